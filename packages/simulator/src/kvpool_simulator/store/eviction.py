"""Which objects go first when space is short."""

from __future__ import annotations

import heapq
import itertools
import math

from kvpool_simulator.store.objects import StoredObject

Entry = tuple[float, int, StoredObject]


class EvictionQueue:
    """Readable objects, by last use. A use costs no search: an entry that turns out to be old is queued again."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._soft_pinned: list[StoredObject] = []
        self._order = itertools.count()
        self._num_gone = 0

    def use(self, found: StoredObject, when: float) -> None:
        """An object is used: it will go later."""
        found.last_use, found.touched = when, next(self._order)
        if not found.queued and not found.hard_pin:
            self._push(found)

    def forget(self, found: StoredObject) -> None:
        """An object is gone."""
        found.gone = True
        self._num_gone += found.queued
        if self._num_gone > 1024 and self._num_gone > len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].gone]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def renew(self, now: float) -> None:
        """Objects whose soft pin has ended are ordinary again."""
        pinned, self._soft_pinned = self._soft_pinned, []
        for found in pinned:
            if found.soft_pin_end > now:
                self._soft_pinned.append(found)
            elif not found.gone:
                self._push(found)

    def take(self, now: float) -> StoredObject | None:
        """The object used longest ago that has neither lease nor soft pin, or None."""
        while self._heap:
            last_use, touched, found = self._heap[0]
            if found.gone or not found.complete:
                heapq.heappop(self._heap)
                found.queued = False
            elif touched != found.touched:
                heapq.heapreplace(self._heap, (found.last_use, found.touched, found))
            elif last_use > now:
                # The lease of the first one runs, so those of all others do.
                return None
            else:
                heapq.heappop(self._heap)
                if found.soft_pin_end <= now:
                    found.queued = False
                    return found
                self._soft_pinned.append(found)
        return None

    def take_soft_pinned(self, now: float) -> StoredObject | None:
        """The same of the objects with a soft pin."""
        free = [o for o in self._soft_pinned if not o.gone and o.complete and o.last_use <= now]
        if not free:
            return None
        found = min(free, key=lambda one: (one.last_use, one.touched))
        self._soft_pinned.remove(found)
        found.queued = False
        return found

    def next_end(self) -> float:
        """When a lease may end next; infinite with none."""
        ends = [o.last_use for o in self._soft_pinned if not o.gone]
        return min([*(self._heap[0][:1] if self._heap else ()), *ends], default=math.inf)

    def _push(self, found: StoredObject) -> None:
        heapq.heappush(self._heap, (found.last_use, found.touched, found))
        found.queued = True
