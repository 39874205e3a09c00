"""A short memory of the store's outages, so that nobody waits for a dead store twice in a row."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvpool_connector.contract.clock import Clock
from kvpool_connector.contract.status import Status, num_outages

logger = logging.getLogger(__name__)


class Outage:
    """After a sign of outage the store counts as down for `pause_s` seconds; then it is tried again."""

    def __init__(self, clock: Clock, pause_s: float) -> None:
        self._clock = clock
        self._pause_s = pause_s
        self._until = float("-inf")

    @property
    def active(self) -> bool:
        """True while the store is not worth asking."""
        return self._clock.now() < self._until

    def note(self, statuses: Sequence[Status]) -> None:
        """Learn from the store's answers. One line is logged when an outage begins."""
        outages = num_outages(statuses)
        if not outages:
            return
        if not self.active:
            logger.warning(
                "event=store_outage keys=%d of=%d pause_s=%g: serving goes on without the pool",
                outages,
                len(statuses),
                self._pause_s,
            )
        self._until = self._clock.now() + self._pause_s
