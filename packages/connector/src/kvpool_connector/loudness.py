"""How loudly a failure is told that comes back with every batch: once a minute at ERROR, in between at DEBUG."""

from __future__ import annotations

import logging
import time

AGAIN_S = 60.0


class Loudness:
    """Remembers what was told lately. The counts that a line leaves out are in the metrics."""

    def __init__(self) -> None:
        self._told_at: dict[str, float] = {}

    def level(self, what: str) -> int:
        """The level of a line about `what`, of which there is a fixed number."""
        now = time.monotonic()
        if now - self._told_at.get(what, float("-inf")) < AGAIN_S:
            return logging.DEBUG
        self._told_at[what] = now
        return logging.ERROR
