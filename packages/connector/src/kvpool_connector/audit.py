"""Reads a sample of what was stored back from the store, and compares it with what was handed over."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import partial

from kvpool_connector.answers import statuses_of
from kvpool_connector.contract.device import Checksums
from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Store
from kvpool_connector.counters import Counters
from kvpool_connector.integrity import component_names
from kvpool_connector.staging import Staging

logger = logging.getLogger(__name__)


class Audit:
    """Audits the saves of one layout, in the thread that saves: no step and no load waits for it.

    Each audit borrows a staging chunk; where none is free it is left out, since loads come first.
    """

    def __init__(
        self,
        store: Store,
        checksums: Checksums,
        layout: ShardLayout,
        staging: Staging,
        trailer_bytes: int,
        every: int,
        counters: Counters,
    ) -> None:
        """`trailer_bytes`: of the checksums that objects carry, 0 for none. Of `every` objects stored one is read."""
        self._store = store
        self._checksums = checksums
        self._names = component_names(layout)
        self._object_bytes = layout.object_bytes
        self._staging = staging
        self._trailer_bytes = trailer_bytes
        self._every = every
        self._counters = counters
        self._turns = itertools.count()

    def check(self, keys: Sequence[str], statuses: Sequence[Status], objects: int) -> list[Status]:
        """What became of objects that were put from address `objects` on, by the store's `statuses`.

        An object that the store took (`OK`) and does not have is a `MISS`; one whose bytes are others is removed, and
        `CORRUPT`.
        """
        found = list(statuses)
        for i, status in enumerate(statuses):
            if status.ok and not next(self._turns) % self._every:
                found[i] = self._read_back(keys[i], objects + i * self._object_bytes)
        return found

    def _read_back(self, key: str, put: int) -> Status:
        with self._staging.chunk(timeout_s=0) as read:
            if read is None:
                self._counters.add("audit_blocks_unread")
                return Status.OK
            # Behind the object: the checksums that it came with, then those of what was handed over.
            trailer = read + self._object_bytes
            addresses, sizes = [[read]], [[self._object_bytes + self._trailer_bytes]]
            (status,) = statuses_of(self._store.get, [key], addresses, sizes)
            if status is Status.MISS:
                self._counters.add("audit_blocks_lost")
                logger.error("event=audit_lost key=%s: the store said that it was stored, and does not have it", key)
                return status
            if not status.ok and status is not Status.CORRUPT:
                self._counters.add("audit_blocks_unread")
                return Status.OK
            wrong: list[int] = []
            if status.ok:
                expected = trailer + self._trailer_bytes
                self._checksums.write(put, 1, expected)
                wrong = self._checksums.differing(read, 0, expected)
                if not wrong:
                    self._counters.add("audit_blocks_ok")
                    return status
                if self._trailer_bytes and not self._checksums.differing(read, 0, trailer):
                    # Whole in itself: another engine computed the same block and was first.
                    self._counters.add("audit_blocks_others")
                    return Status.EXISTS
        self._counters.add("audit_blocks_wrong")
        logger.error(
            "event=audit_wrong key=%s components=%s: not what was handed over; removed",
            key,
            ",".join(self._names[k] for k in wrong[:8]) or "(another size)",
        )
        # As long as it is there it is a hit, and nobody puts a right one in its place.
        statuses_of(partial(self._store.remove, force=True), [key])
        return Status.CORRUPT
