"""Moves a range of layers of some blocks between the cache and open objects of a store, through staging.

One address and one range a block: straight from the cache a layer's small pieces would gain nothing over moving whole
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpool_connector.answers import statuses_of
from kvpool_connector.contract.device import Copier, Device
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import SessionStore
from kvpool_connector.layer_plan import LayerPlan, LayerRange
from kvpool_connector.staging import Staging
from kvpool_connector.transfer import Hold, scatter_runs

MAX_BLOCKS = 1024
"""Ranges of one call; over TCP Mooncake fails above about 2,048."""


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
    ) -> None:
        """`timeout_s`: how long a range may wait for a staging chunk."""
        self.store = store
        self._staging = staging
        self._timeout_s = timeout_s
        self._copiers: dict[tuple[int, int], Copier] = {
            (piece.shard, piece.index): device.copier(piece.layout, kv_caches, staging.buffer)
            for pieces in plan.ranges
            for piece in pieces
        }

    def per_call(self, piece: LayerRange) -> int:
        """Blocks whose range fits one staging chunk."""
        return max(1, min(self._staging.chunk_bytes // piece.layout.object_bytes, MAX_BLOCKS))

    def save(
        self,
        piece: LayerRange,
        keys: Sequence[str],
        block_ids: Sequence[int],
        hold: Hold,
        may_write: Callable[[], bool],
    ) -> list[Status | None]:
        """Write a range of blocks, at most `per_call`, into open objects; the blocks are held while they are copied.

        `may_write` is asked right before the store is: False when the sessions are too old to write to. None for a
        block that was not written because there was no leave to read it, no staging, or no time left.
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
            if not may_write():
                return [None] * len(keys)
            wanted = [key for key, leave in zip(keys, granted, strict=True) if leave]
            written = iter(statuses_of(self.store.put_ranges, wanted, *_rows(piece, chunk, len(wanted))))
            return [next(written) if leave else None for leave in granted]

    def load(self, piece: LayerRange, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """Fill a range of blocks, at most `per_call`, from open objects. A block whose status is not `OK` is dirty."""
        with self._chunk() as chunk:
            if chunk is None:
                return [Status.TIMEOUT] * len(keys)
            statuses = statuses_of(self.store.get_ranges, keys, *_rows(piece, chunk, len(keys)))
            copier = self._copiers[piece.shard, piece.index]
            return scatter_runs(copier, piece.layout.object_bytes, chunk, block_ids, statuses, hold)

    @contextmanager
    def _chunk(self) -> Iterator[int | None]:
        with self._staging.chunk(self._timeout_s) as chunk:
            yield chunk


def _rows(piece: LayerRange, chunk: int, count: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Addresses, sizes and offsets: one range a block, the blocks one after the other in the chunk."""
    size = piece.layout.object_bytes
    return [[chunk + i * size] for i in range(count)], [[size]] * count, [[piece.offset]] * count
