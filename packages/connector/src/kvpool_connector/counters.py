"""Counts of what the connector did, by name; cheap enough to keep always."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Named counts that only grow. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise the count `name` by `amount` (not negative)."""
        if amount:
            with self._lock:
                self._counts[name] += amount

    def totals(self) -> dict[str, int]:
        """All counts since the start."""
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, int]:
        """What was counted since the last call of `take`."""
        with self._lock:
            grown = self._counts - self._taken
            self._taken = self._counts.copy()
            return dict(grown)
