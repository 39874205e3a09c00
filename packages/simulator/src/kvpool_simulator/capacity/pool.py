"""A pool of a given size: which keys it holds, by Mooncake's rules of leases and eviction. No byte is kept.

The rules are those of the simulated store (0.3.13.post1): a lookup leases, a put does not; above the high watermark, or
after a put found no room, a share of all objects goes, those whose lease ended (or that were put) longest ago first.
Objects of one size fill a segment without holes, so room is counted and not laid out.
"""

from __future__ import annotations

import heapq
import itertools
import math

HIGH_WATERMARK = 0.90
EVICTION_RATIO = 0.05


class SizedPool:
    """Objects of `object_bytes` in `capacity` bytes. Times in seconds, never going back."""

    def __init__(self, capacity: int, object_bytes: int, lease_s: float = 10.0) -> None:
        self._room = capacity // object_bytes
        self._lease_s = lease_s
        self._used: dict[str, float] = {}
        """What eviction orders by: the end of the lease, or the time of the put. What lies in the future is leased."""
        self._queue: list[tuple[float, int, str]] = []
        self._sequence = itertools.count()
        self.num_evicted = 0
        self.num_refused = 0

    def __len__(self) -> int:
        """Objects that are there."""
        return len(self._used)

    def exist(self, key: str, now: float) -> bool:
        """Whether an object is there; leases it."""
        if key not in self._used:
            return False
        self._touch(key, now + self._lease_s)
        return True

    def put(self, key: str, now: float) -> bool:
        """Store an object; False when there is no room, in which case some is made for the next."""
        if key in self._used:
            return True
        if len(self._used) >= self._room:
            self.num_refused += 1
            self._evict(now)
            return False
        self._touch(key, now)
        if len(self._used) > HIGH_WATERMARK * self._room:
            self._evict(now)
        # With all others leased, the newest is the one that goes.
        if key not in self._used:
            self.num_refused += 1
            return False
        return True

    def _touch(self, key: str, when: float) -> None:
        self._used[key] = when
        heapq.heappush(self._queue, (when, next(self._sequence), key))

    def _evict(self, now: float) -> None:
        share = max(EVICTION_RATIO, len(self._used) / max(self._room, 1) - HIGH_WATERMARK + EVICTION_RATIO)
        wanted = max(1, math.ceil(len(self._used) * share))
        while wanted and self._queue and self._queue[0][0] <= now:
            when, _, key = heapq.heappop(self._queue)
            # Entries of a key that was used again since, or is gone, say nothing.
            if self._used.get(key) == when:
                del self._used[key]
                self.num_evicted += 1
                wanted -= 1
