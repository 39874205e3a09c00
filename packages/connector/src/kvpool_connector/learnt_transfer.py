"""Direct or packed transfer, learnt from how long single blocks take either way.

In local memory direct transfer saves a copy; from another process packed transfer is faster, several times for small
pages. Where a store puts its objects only the store knows, and it changes: so both ways are tried, one block each, side
by side in a move that has to be made anyway.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal

from kvpool_connector.contract.clock import Clock
from kvpool_connector.contract.status import OUTAGES, Status, num_outages
from kvpool_connector.transfer import Hold, Transfer

logger = logging.getLogger(__name__)

SAMPLES = 3
"""Trials whose median decides: no single slow one counts."""
FASTER = 0.95
"""Part of packed transfer's time that direct transfer must stay below to be taken; once taken, it may take as long."""
REGRET = 0.01
"""Part of the time spent moving that may be lost by trying the slower way again: it may have become the faster one."""
FAILED_S = 1.0
"""What a failure of direct transfer alone counts for: a block that is computed, not a copy that was slow."""
FAILURES = frozenset((Status.INVALID, *OUTAGES))
"""Speak of the way. What else is not well speaks of the object, of the blocks or of the store's room."""

Way = Literal["packed", "direct"]


class Preference:
    """Which way one direction goes. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ratios: deque[float] = deque(maxlen=SAMPLES)
        self._trying = False
        self._num_tried = 0
        self._moved_s = 0.0
        self._lost_s = 0.0
        self.way: Way = "packed"

    def begin_trial(self) -> bool:
        """Whether to try both ways now. Then nobody else does until `end_trial`: two would measure each other."""
        with self._lock:
            affordable = self._num_tried < SAMPLES or self._lost_s <= REGRET * self._moved_s
            if self._trying or not affordable:
                return False
            self._trying = True
            return True

    def end_trial(self, packed: Status, packed_s: float, direct: Status, direct_s: float) -> None:
        """Learn from one block moved either way, in seconds."""
        with self._lock:
            self._trying = False
            if packed.ok and direct in FAILURES:
                self._give_up_direct()
            elif packed.ok and direct.ok and packed_s > 0:
                self._num_tried += 1
                self._lost_s += abs(direct_s - packed_s)
                self._ratios.append(direct_s / packed_s)
                self._choose()

    def moved(self, seconds: float, statuses: Sequence[Status]) -> None:
        """Take account of a move."""
        with self._lock:
            self._moved_s += seconds
            if self.way == "direct" and num_outages(statuses):
                self._give_up_direct()

    def _give_up_direct(self) -> None:
        # It may fail where packed transfer does not: what is known of its speed says nothing any more.
        self._ratios.clear()
        self._lost_s += FAILED_S
        self._num_tried = SAMPLES
        self._take("packed")

    def _choose(self) -> None:
        if len(self._ratios) == SAMPLES:
            limit = 1.0 if self.way == "direct" else FASTER
            self._take("direct" if statistics.median(self._ratios) <= limit else "packed")

    def _take(self, way: Way) -> None:
        if way != self.way:
            logger.info("event=transfer_way way=%s ratios=%s", way, [round(ratio, 2) for ratio in self._ratios])
        self.way = way


class LearntTransfer:
    """Moves blocks by the way that has proved the faster one, saves and loads apart."""

    def __init__(self, packed: Transfer, direct: Transfer, clock: Clock) -> None:
        """Both ways move the same objects."""
        assert packed.stored_bytes == direct.stored_bytes, "checksums are for packed transfer alone"
        self._ways: dict[Way, Transfer] = {"packed": packed, "direct": direct}
        self._clock = clock
        self.stored_bytes = packed.stored_bytes
        self.saves, self.loads = Preference(), Preference()

    def save(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """See `Transfer`."""
        return self._move("save", self.saves, keys, block_ids, hold)

    def load(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        """See `Transfer`."""
        return self._move("load", self.loads, keys, block_ids, hold)

    def _move(
        self,
        what: Literal["save", "load"],
        preference: Preference,
        keys: Sequence[str],
        block_ids: Sequence[int],
        hold: Hold,
    ) -> list[Status]:
        timed = _TimedHold(hold, self._clock)

        def move(way: Way, part: slice) -> tuple[list[Status], float]:
            """Statuses, and seconds apart from those that leave took to come."""
            start, waited_s = self._clock.now(), timed.waited_s
            statuses: list[Status] = getattr(self._ways[way], what)(keys[part], block_ids[part], timed)
            return statuses, self._clock.now() - start - (timed.waited_s - waited_s)

        begun = 0
        statuses: list[Status] = []
        if len(keys) > 1 and preference.begin_trial():
            # As if nothing had been learnt, should one raise.
            packed = direct = [Status.WITHDRAWN]
            packed_s = direct_s = 0.0
            try:
                packed, packed_s = move("packed", slice(0, 1))
                direct, direct_s = move("direct", slice(1, 2))
            finally:
                preference.end_trial(packed[0], packed_s, direct[0], direct_s)
            begun, statuses = 2, [*packed, *direct]
        if begun < len(keys):
            rest, seconds = move(preference.way, slice(begun, None))
            preference.moved(seconds, rest)
            statuses += rest
        return statuses


class _TimedHold:
    """A hold, and how long its leave took to come."""

    def __init__(self, hold: Hold, clock: Clock) -> None:
        self._hold = hold
        self._clock = clock
        self.waited_s = 0.0

    def claim(self, block_ids: Sequence[int]) -> list[bool]:
        """See `Hold`."""
        start = self._clock.now()
        granted = self._hold.claim(block_ids)
        self.waited_s += self._clock.now() - start
        return granted

    def release(self, block_ids: Sequence[int]) -> None:
        """See `Hold`."""
        self._hold.release(block_ids)
