"""Reads a sample of what was stored back from the store, and compares it with what was handed over."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvpool_connector.answers import statuses_of
from kvpool_connector.contract.device import Checksums, DeviceLateError
from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Store
from kvpool_connector.counters import Counters
from kvpool_connector.integrity import component_names
from kvpool_connector.loudness import Loudness
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
        stride: int | None = None,
    ) -> None:
        """`trailer_bytes`: of the checksums that objects carry, 0 for none. Of `every` objects stored one is read.

        `stride`: see `kvpool_connector.contract.device.Device.copier`.
        """
        self._store = store
        self._checksums = checksums
        self._names = component_names(layout)
        self._object_bytes = layout.object_bytes
        self._staging = staging
        self._trailer_bytes = trailer_bytes
        self._stride = stride or layout.object_bytes
        self._every = every
        self._counters = counters
        self._turns = itertools.count()
        self._loudness = Loudness()

    def check(
        self, keys: Sequence[str], statuses: Sequence[Status], expect: Callable[[int, int], None]
    ) -> list[Status]:
        """What became of objects that were put, by the store's `statuses`.

        `expect(i, target)` writes the checksums of what was handed over under `keys[i]` to address `target`.
        An object that the store took (`OK`) and does not have is a `MISS`; one whose bytes are others is removed, and
        `CORRUPT`.
        """
        found = list(statuses)
        lost: list[str] = []
        wrong: list[tuple[str, str]] = []
        for i, status in enumerate(statuses):
            if status.ok and not next(self._turns) % self._every:
                found[i], components = self._read_back(keys[i], partial(expect, i))
                if found[i] is Status.MISS:
                    lost.append(keys[i])
                elif found[i] is Status.CORRUPT:
                    wrong.append((keys[i], components))
        self._tell(lost, wrong)
        return found

    def checksum(self, objects: int, index: int, target: int) -> None:
        """Write the checksums of object `index` of those at address `objects` to address `target`."""
        self._checksums.write(objects + index * self._stride, 1, target)

    def _tell(self, lost: Sequence[str], wrong: Sequence[tuple[str, str]]) -> None:
        if lost:
            logger.log(
                self._loudness.level("lost"),
                "event=audit_lost key=%s blocks=%d: the store said that it was stored, and does not have it",
                lost[0],
                len(lost),
            )
        if wrong:
            key, components = wrong[0]
            logger.log(
                self._loudness.level("wrong"),
                "event=audit_wrong key=%s components=%s blocks=%d: not what was handed over; removed",
                key,
                components,
                len(wrong),
            )

    def _read_back(self, key: str, expect: Callable[[int], None]) -> tuple[Status, str]:
        """What became of one object, and the names of its components that hold other bytes."""
        try:
            return self._compared(key, expect)
        except DeviceLateError:
            # Of the object, which the store has taken, it says nothing.
            self._counters.add("audit_blocks_unread")
            return Status.OK, ""

    def _compared(self, key: str, expect: Callable[[int], None]) -> tuple[Status, str]:
        with self._staging.chunk(timeout_s=0) as read:
            if read is None:
                self._counters.add("audit_blocks_unread")
                return Status.OK, ""
            # Behind the object: the checksums that it came with, then those of what was handed over.
            trailer = read + self._object_bytes
            addresses, sizes = [[read]], [[self._object_bytes + self._trailer_bytes]]
            (status,) = statuses_of(self._store.get, [key], addresses, sizes)
            if status is Status.MISS:
                self._counters.add("audit_blocks_lost")
                return status, ""
            if not status.ok and status is not Status.CORRUPT:
                self._counters.add("audit_blocks_unread")
                return Status.OK, ""
            wrong: list[int] = []
            if status.ok:
                expected = trailer + self._trailer_bytes
                expect(expected)
                wrong = self._checksums.differing(read, 0, expected)
                if not wrong:
                    self._counters.add("audit_blocks_ok")
                    return status, ""
                if self._trailer_bytes and not self._checksums.differing(read, 0, trailer):
                    # Whole in itself: another engine computed the same block and was first.
                    self._counters.add("audit_blocks_others")
                    return Status.EXISTS, ""
        self._counters.add("audit_blocks_wrong")
        # As long as it is there it is a hit, and nobody puts a right one in its place.
        statuses_of(partial(self._store.remove, force=True), [key])
        return Status.CORRUPT, ",".join(self._names[k] for k in wrong[:8]) or "(another size)"
