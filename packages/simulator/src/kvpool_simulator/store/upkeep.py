"""What the master's own thread does as time passes: evict, release abandoned space, drop clients that are silent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_simulator.store.master import Master

PERIOD_S = 0.010


class Upkeep:
    """The rounds that a master makes every 10 ms, made up for whenever somebody calls."""

    def __init__(self, master: Master, now: float) -> None:
        self._master = master
        self._done = now
        """Time of the last round."""
        # The real master is always a little older than its first write.
        self._last_scan = now - 2 * PERIOD_S

    def catch_up(self) -> None:
        """Make the rounds that are due. Rounds in which nothing can happen are passed over."""
        now = self._master.now()
        if now - self._done < PERIOD_S:
            return
        self._drop_silent(now)
        when = self._done
        while (when := self._next(when)) <= now:
            self._round(when)
        self._done += math.floor((now - self._done) / PERIOD_S + 1e-6) * PERIOD_S

    def _next(self, after: float) -> float:
        """Time of the next round in which something can happen; infinite with none."""
        master, scan = self._master, self._last_scan + self._master.options.put_start_release_timeout_sec
        due = math.inf if not (master.writing or master.discarded) else max(scan, after)
        if self._short_of_space():
            # Nothing but the end of a lease makes more objects evictable.
            due = min(due, max(after, master.queue.next_end()))
        if due == math.inf:
            return math.inf
        return after + max(1, math.ceil((due - after) / PERIOD_S - 1e-6)) * PERIOD_S

    def _used_ratio(self) -> float:
        capacity = self._master.segments.capacity_bytes
        return self._master.segments.used_bytes / capacity if capacity else 0.0

    def _short_of_space(self) -> bool:
        options = self._master.options
        wanted = self._master.space_wanted and options.eviction_ratio > 0
        return wanted or self._used_ratio() > options.eviction_high_watermark_ratio

    def _round(self, when: float) -> None:
        master = self._master
        release_after = master.options.put_start_release_timeout_sec
        if self._short_of_space():
            self._evict(when)
        elif when - self._last_scan <= release_after:
            return
        # Scanned along with evictions, otherwise once in a release time-out.
        self._last_scan = when
        for found in [o for o in master.writing if o.started + release_after < when]:
            master.discard(found, found.started)
        due = [found for release, found in master.discarded if release < when]
        master.discarded = [entry for entry in master.discarded if entry[0] >= when]
        for found in due:
            found.release()

    def _evict(self, when: float) -> None:
        master, options = self._master, self._master.options
        ratio, excess = options.eviction_ratio, self._used_ratio() - options.eviction_high_watermark_ratio
        share = max(ratio, excess + ratio)
        wanted = math.ceil(master.num_evictable * share)
        # Soft-pinned objects go only when nothing else is left, and fewer of them.
        at_least = math.ceil(master.num_evictable * max(share / 2, excess))
        if not master.num_evictable:
            master.space_wanted = False
        master.queue.renew(when)
        for num_gone in range(wanted):
            found = master.queue.take(when)
            if found is None and num_gone < at_least and options.allow_evict_soft_pinned_objects:
                found = master.queue.take_soft_pinned(when)
            if found is None:
                return
            master.drop(found)
            master.num_evicted += 1
            master.space_wanted = False

    def _drop_silent(self, now: float) -> None:
        master = self._master
        for segment in master.segments.silent(now - master.options.client_ttl_sec):
            master.drop_segment(segment)
