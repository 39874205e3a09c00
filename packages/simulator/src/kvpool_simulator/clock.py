"""Time that tests move."""

from __future__ import annotations

import threading


class VirtualClock:
    """Seconds that pass only when somebody says so. Safe from several threads."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises `ValueError` for a negative amount."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        with self._lock:
            self._now += seconds
