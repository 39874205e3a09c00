"""Moves whole blocks of one layout between the cache and the store.

Both ways of moving write and read the same objects: `DirectTransfer` hands the store every piece of a block,
`PackedTransfer` copies a block's pieces into one staging chunk and hands over one address a block, which is what a
network likes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from kvpool_connector.answers import statuses_of
from kvpool_connector.audit import Audit
from kvpool_connector.contract.device import Copier, DeviceLateError
from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces, Store
from kvpool_connector.integrity import Integrity, spacing
from kvpool_connector.planner import Planner
from kvpool_connector.staging import Staging

logger = logging.getLogger(__name__)


class Hold(Protocol):
    """Leave to touch blocks, asked for right before they are touched."""

    def claim(self, block_ids: Sequence[int]) -> list[bool]:
        """For each block whether it may be touched. A claimed block stays as it is until `release`."""
        ...

    def release(self, block_ids: Sequence[int]) -> None:
        """The blocks are not touched any more."""
        ...


class Unheld:
    """Leave for everything: nobody else touches the blocks."""

    def claim(self, block_ids: Sequence[int]) -> list[bool]:
        """All of them."""
        return [True] * len(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Nothing to do."""


class Transfer(Protocol):
    """Saves and loads of whole blocks: one status a block, in order, never an exception for a fault of the store."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of one block's object."""
        ...

    def save(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """Store block `block_ids[i]` under `keys[i]`.

        `OK` written, `EXISTS` was there, `WITHDRAWN` no leave, `TIMEOUT` no staging in time, `DEVICE_LATE` not copied
        in time, else what the store said.
        """
        ...

    def load(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """Fill block `block_ids[i]` from `keys[i]`. A block whose status is not `OK` is dirty."""
        ...


class DirectTransfer:
    """Piece by piece between the cache, whose regions are registered, and the store."""

    def __init__(self, store: Store, layout: ShardLayout, max_pieces: int) -> None:
        """`max_pieces`: of blocks that are held at once, as many as the store moves in one call."""
        self._store = store
        self._planner = Planner(layout)
        self._per_call = max(1, max_pieces // layout.num_pieces)
        self.stored_bytes = layout.object_bytes

    def save(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """See `Transfer`. The blocks are held until the store has read them."""
        return save_missing(
            self._store, keys, block_ids, hold, lambda k, ids: self._held(self._store.put, k, ids, hold)
        )

    def load(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """See `Transfer`."""
        return self._held(self._store.get, keys, block_ids, hold)

    def _held(
        self,
        call: Callable[[Sequence[str], Pieces, Pieces], list[Status]],
        keys: Sequence[str],
        ids: Sequence[int],
        hold: Hold,
    ) -> list[Status]:
        statuses: list[Status] = []
        # A step that needs blocks waits for one call of the store at most.
        for part in parts(len(keys), self._per_call):
            granted = hold.claim(ids[part])
            touched = [block_id for block_id, leave in zip(ids[part], granted, strict=True) if leave]
            try:
                wanted = [key for key, leave in zip(keys[part], granted, strict=True) if leave]
                addresses = self._planner.addresses(touched)
                moved = statuses_of(call, wanted, addresses, [self._planner.sizes] * len(touched))
            finally:
                hold.release(touched)
            statuses += spread(granted, moved)
        return statuses


class PackedTransfer:
    """Through a staging chunk: one address a block, its checksums right behind its pages."""

    def __init__(
        self,
        store: Store,
        layout: ShardLayout,
        copier: Copier,
        staging: Staging,
        timeout_s: float,
        integrity: Integrity | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._store = store
        self._copier = copier
        self._staging = staging
        self._timeout_s = timeout_s
        self._integrity = integrity
        self._audit = audit
        self._object_bytes = layout.object_bytes
        self.stored_bytes = layout.object_bytes + (integrity.trailer_bytes if integrity else 0)
        self._stride = spacing(layout) if integrity else layout.object_bytes
        self._per_chunk = max(1, min(staging.chunk_bytes // self._stride, 1024))

    def save(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """See `Transfer`. The blocks are held only while they are copied out."""
        return save_missing(
            self._store, keys, block_ids, hold, lambda k, ids: self._by_chunk(k, ids, hold, self._save_chunk)
        )

    def load(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """See `Transfer`. The blocks are touched only after the store has delivered, and only with leave."""
        return self._by_chunk(keys, block_ids, hold, self._load_chunk)

    def _save_chunk(self, keys: Sequence[str], ids: Sequence[int], hold: Hold, chunk: int) -> list[Status]:
        granted = hold.claim(ids)
        touched = [block_id for block_id, leave in zip(ids, granted, strict=True) if leave]
        try:
            if touched:
                self._copier.gather(touched, chunk)
        finally:
            hold.release(touched)
        if self._integrity:
            self._integrity.seal(chunk, len(touched), chunk + self._object_bytes)
        wanted = [key for key, leave in zip(keys, granted, strict=True) if leave]
        statuses = statuses_of(self._store.put, wanted, *self._objects(chunk, len(wanted)))
        if self._audit:
            statuses = self._audit.check(wanted, statuses, partial(self._audit.checksum, chunk))
        return spread(granted, statuses)

    def _load_chunk(self, keys: Sequence[str], ids: Sequence[int], hold: Hold, chunk: int) -> list[Status]:
        statuses = list(statuses_of(self._store.get, keys, *self._objects(chunk, len(keys))))
        if self._integrity:
            loaded = [i for i, status in enumerate(statuses) if status.ok]
            broken = self._integrity.broken(keys, loaded, chunk, chunk + self._object_bytes)
            for i in broken:
                statuses[i] = Status.CORRUPT
            # As long as it is there it is found again, and nobody puts a right one in its place.
            statuses_of(partial(self._store.remove, force=True), [keys[i] for i in broken])
        return scatter_runs(self._copier, self._stride, chunk, ids, statuses, hold)

    def _by_chunk(
        self,
        keys: Sequence[str],
        ids: Sequence[int],
        hold: Hold,
        move: Callable[[Sequence[str], Sequence[int], Hold, int], list[Status]],
    ) -> list[Status]:
        statuses: list[Status] = []
        for part in parts(len(keys), self._per_chunk):
            moved = [Status.TIMEOUT] * len(keys[part])
            try:
                with self._staging.chunk(self._timeout_s) as chunk:
                    if chunk is not None:
                        moved = move(keys[part], ids[part], hold, chunk)
            except DeviceLateError as error:
                tell_late(error, len(keys[part]))
                moved = [Status.DEVICE_LATE] * len(keys[part])
            statuses += moved
        return statuses

    def _objects(self, chunk: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
        return [[chunk + i * self._stride] for i in range(count)], [[self.stored_bytes]] * count


def tell_late(error: DeviceLateError, num_blocks: int) -> None:
    """Log that blocks were not moved because the device is late."""
    logger.error("event=device_late limit_s=%g blocks=%d: %s: not moved", error.limit_s, num_blocks, error)


def scatter_runs(
    copier: Copier, stride: int, chunk: int, ids: Sequence[int], statuses: Sequence[Status], hold: Hold
) -> list[Status]:
    """Copy what was read well, one object every `stride` bytes of a chunk, to its blocks, with leave; a status each."""
    granted = hold.claim(ids)
    try:
        # Runs of neighbours in the chunk are copied at once.
        start = 0
        while start < len(ids):
            end = start
            while end < len(ids) and statuses[end].ok and granted[end]:
                end += 1
            if end > start:
                copier.scatter(ids[start:end], chunk + start * stride)
            start = end + 1
    finally:
        hold.release([block_id for block_id, leave in zip(ids, granted, strict=True) if leave])
    return [
        status if leave or not status.ok else Status.TIMEOUT for status, leave in zip(statuses, granted, strict=True)
    ]


def save_missing(
    store: Store,
    keys: Sequence[str],
    block_ids: Sequence[int],
    hold: Hold,
    put: Callable[[Sequence[str], Sequence[int]], list[Status]],
) -> list[Status]:
    """Put only what the store does not have: a block once stored is never read from the cache again."""
    present = statuses_of(store.exist, keys)
    missing = [i for i, status in enumerate(present) if status is Status.MISS]
    hold.release([block_id for block_id, status in zip(block_ids, present, strict=True) if status is not Status.MISS])
    statuses = [Status.EXISTS if status.ok else status for status in present]
    written = put([keys[i] for i in missing], [block_ids[i] for i in missing]) if missing else []
    for i, status in zip(missing, written, strict=True):
        statuses[i] = status
    return statuses


def spread(granted: Sequence[bool], statuses: Sequence[Status]) -> list[Status]:
    """One status for every block: what was not granted was withdrawn."""
    given = iter(statuses)
    return [next(given) if leave else Status.WITHDRAWN for leave in granted]


def parts(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `0 .. count`."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
