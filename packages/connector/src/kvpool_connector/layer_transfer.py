"""Moves a range of layers of some blocks between the cache and open objects of a store, through staging.

One address and one range a block: straight from the cache a layer's small pieces would gain nothing over moving whole
objects. Where objects carry checksums, those of all layers are one range more: written when all layers are in, and read
before the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvpool_connector.answers import statuses_of
from kvpool_connector.contract.device import CHECKSUM_BYTES, Checksums, Copier, Device
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import SessionStore
from kvpool_connector.integrity import Integrity
from kvpool_connector.layer_plan import LayerPlan, LayerRange
from kvpool_connector.staging import Staging
from kvpool_connector.transfer import Hold, parts, scatter_runs

MAX_BLOCKS = 1024
"""Ranges of one call; over TCP Mooncake fails above about 2,048."""
Rows = tuple[list[list[int]], list[list[int]], list[list[int]]]
"""Addresses, sizes and offsets, by key."""


@dataclass(frozen=True)
class _Sums:
    """The checksums of a range's components."""

    checksums: Checksums
    place: slice
    """Where they lie among those of the object, in bytes."""
    integrity: Integrity | None
    """What compares them, where objects carry them."""


class LayerTransfer:
    """Saves and loads ranges of layers; safe from several threads."""

    def __init__(
        self,
        store: SessionStore,
        device: Device,
        plan: LayerPlan,
        kv_caches: Mapping[str, Any],
        staging: Staging,
        timeout_s: float,
        integrity: Sequence[Integrity | None],
        audited: Sequence[bool],
    ) -> None:
        """`timeout_s`: how long a range may wait for a staging chunk.

        By shard, `integrity` is what compares the checksums that objects carry, None where they carry none, and
        `audited` says whether checksums of what is written are wanted all the same.
        """
        self.store = store
        self._device = device
        self._staging = staging
        self._timeout_s = timeout_s
        self._integrity = integrity
        self._page_bytes = [sum(piece.layout.object_bytes for piece in pieces) for pieces in plan.ranges]
        """By shard, where an object's checksums begin."""
        self._sums: dict[tuple[int, int], _Sums] = {}
        self.sums_bytes = [0] * len(plan.ranges)
        """By shard, bytes of one object's checksums; 0 where none are made."""
        for shard, pieces in enumerate(plan.ranges):
            for piece in pieces if integrity[shard] or audited[shard] else ():
                start = self.sums_bytes[shard]
                self.sums_bytes[shard] += CHECKSUM_BYTES * len(piece.layout.components)
                checksums, whole = device.checksums(piece.layout, staging.buffer), integrity[shard]
                self._sums[shard, piece.index] = _Sums(
                    checksums,
                    slice(start, self.sums_bytes[shard]),
                    whole.part(checksums, piece.layout) if whole else None,
                )
        self._copiers: dict[tuple[int, int], Copier] = {
            (piece.shard, piece.index): device.copier(piece.layout, kv_caches, staging.buffer)
            for pieces in plan.ranges
            for piece in pieces
        }

    def per_call(self, piece: LayerRange) -> int:
        """Blocks whose range, and all of whose checksums, fit one staging chunk."""
        size = piece.layout.object_bytes + self._sums_size(piece)
        size = max(size, self.sums_bytes[piece.shard])
        return max(1, min(self._staging.chunk_bytes // size, MAX_BLOCKS))

    def sampled(self, shard: int) -> bool:
        """Whether the object of `shard` that is loaded next is compared with its checksums."""
        integrity = self._integrity[shard]
        return integrity is not None and integrity.sampled()

    def save(
        self,
        piece: LayerRange,
        keys: Sequence[str],
        block_ids: Sequence[int],
        hold: Hold,
        may_write: Callable[[], bool],
        sums: Sequence[bytearray],
    ) -> list[Status | None]:
        """Write a range of blocks, at most `per_call`, into open objects; the blocks are held while they are copied.

        `sums[i]`, of `sums_bytes[piece.shard]` bytes, gets the checksums of the range. `may_write` is asked right
        before the store is: False when the sessions are too old to write to. None for a block that was not written
        because there was no leave to read it, no staging, or no time left.
        """
        with self._chunk() as chunk:
            if chunk is None:
                return [None] * len(keys)
            granted = hold.claim(block_ids)
            touched = [block_id for block_id, leave in zip(block_ids, granted, strict=True) if leave]
            try:
                if touched:
                    self._copiers[piece.shard, piece.index].gather(touched, chunk)
            finally:
                hold.release(touched)
            self._note_sums(piece, chunk, [one for one, leave in zip(sums, granted, strict=True) if leave])
            if not may_write():
                return [None] * len(keys)
            wanted = [key for key, leave in zip(keys, granted, strict=True) if leave]
            written = iter(statuses_of(self.store.put_ranges, wanted, *_rows(piece, chunk, len(wanted))))
            return [next(written) if leave else None for leave in granted]

    def seal(
        self, shard: int, keys: Sequence[str], sums: Sequence[bytes | bytearray], may_write: Callable[[], bool]
    ) -> list[Status | None]:
        """Write the checksums of whole objects into them, where objects carry any; `may_write` and None as for `save`.

        All ranges must be in: `sums` are those that `save` made.
        """
        if self._integrity[shard] is None:
            return [Status.OK] * len(keys)
        statuses: list[Status | None] = []
        for part in self._trailer_parts(shard, len(keys)):
            with self._chunk() as chunk:
                if chunk is not None:
                    self._device.write(self._staging.buffer, chunk, b"".join(sums[part]))
                if chunk is None or not may_write():
                    statuses += [None] * len(keys[part])
                    continue
                rows = self._trailer_rows(shard, chunk, len(keys[part]))
                statuses += statuses_of(self.store.put_ranges, keys[part], *rows)
        return statuses

    def load_sums(self, shard: int, keys: Sequence[str]) -> tuple[list[Status], list[bytes]]:
        """The checksums that open objects carry; of no use where the status is not `OK`."""
        size = self.sums_bytes[shard]
        statuses: list[Status] = []
        sums: list[bytes] = []
        for part in self._trailer_parts(shard, len(keys)):
            count = len(keys[part])
            with self._chunk() as chunk:
                if chunk is None:
                    statuses += [Status.TIMEOUT] * count
                    sums += [b""] * count
                    continue
                statuses += statuses_of(self.store.get_ranges, keys[part], *self._trailer_rows(shard, chunk, count))
                found = self._device.read(self._staging.buffer, chunk, count * size)
            sums += [found[i * size : (i + 1) * size] for i in range(count)]
        return statuses, sums

    def expect(self, sums: Sequence[bytes | bytearray], index: int, target: int) -> None:
        """Write the checksums `sums[index]` to address `target` in the staging area."""
        self._device.write(self._staging.buffer, target, bytes(sums[index]))

    def load(
        self, piece: LayerRange, keys: Sequence[str], block_ids: Sequence[int], hold: Hold, sums: Sequence[bytes]
    ) -> tuple[list[Status], list[str]]:
        """Fill a range of blocks, at most `per_call`, from open objects. A block whose status is not `OK` is dirty.

        What differs from `sums[i]`, if there are any, is `CORRUPT` and never reaches the cache; its keys are returned
        too, since the store can also say `CORRUPT`.
        """
        with self._chunk() as chunk:
            if chunk is None:
                return [Status.TIMEOUT] * len(keys), []
            statuses = list(statuses_of(self.store.get_ranges, keys, *_rows(piece, chunk, len(keys))))
            broken = self._broken(
                piece, keys, chunk, [one if s.ok else b"" for one, s in zip(sums, statuses, strict=True)]
            )
            for i in broken:
                statuses[i] = Status.CORRUPT
            copier = self._copiers[piece.shard, piece.index]
            ended = scatter_runs(copier, piece.layout.object_bytes, chunk, block_ids, statuses, hold)
            return ended, [keys[i] for i in broken]

    def _sums_size(self, piece: LayerRange) -> int:
        found = self._sums.get((piece.shard, piece.index))
        return found.place.stop - found.place.start if found else 0

    def _behind(self, piece: LayerRange, chunk: int) -> int:
        """Where a range's checksums lie in a chunk: behind the pages of as many blocks as it may hold."""
        return chunk + self.per_call(piece) * piece.layout.object_bytes

    def _note_sums(self, piece: LayerRange, chunk: int, sums: Sequence[bytearray]) -> None:
        """Checksum what lies in a chunk; `sums[i]` gets those of block `i`."""
        found = self._sums.get((piece.shard, piece.index))
        if found is None or not sums:
            return
        behind, size = self._behind(piece, chunk), self._sums_size(piece)
        found.checksums.write(chunk, len(sums), behind)
        made = self._device.read(self._staging.buffer, behind, len(sums) * size)
        for i, one in enumerate(sums):
            one[found.place] = made[i * size : (i + 1) * size]

    def _broken(self, piece: LayerRange, keys: Sequence[str], chunk: int, sums: Sequence[bytes]) -> list[int]:
        """Which of the blocks in a chunk differ from their checksums; those without any are not looked at."""
        compared = [i for i, one in enumerate(sums) if one]
        found = self._sums.get((piece.shard, piece.index))
        if not compared or found is None or found.integrity is None:
            return []
        behind, empty = self._behind(piece, chunk), bytes(self._sums_size(piece))
        expected = b"".join(one[found.place] if one else empty for one in sums)
        self._device.write(self._staging.buffer, behind, expected)
        return found.integrity.broken(keys, compared, chunk, behind)

    def _trailer_parts(self, shard: int, count: int) -> Iterator[slice]:
        return parts(count, max(1, min(self._staging.chunk_bytes // self.sums_bytes[shard], MAX_BLOCKS)))

    def _trailer_rows(self, shard: int, chunk: int, count: int) -> Rows:
        size = self.sums_bytes[shard]
        return [[chunk + i * size] for i in range(count)], [[size]] * count, [[self._page_bytes[shard]]] * count

    @contextmanager
    def _chunk(self) -> Iterator[int | None]:
        with self._staging.chunk(self._timeout_s) as chunk:
            yield chunk


def _rows(piece: LayerRange, chunk: int, count: int) -> Rows:
    """Addresses, sizes and offsets: one range a block, the blocks one after the other in the chunk."""
    size = piece.layout.object_bytes
    return [[chunk + i * size] for i in range(count)], [[size]] * count, [[piece.offset]] * count
