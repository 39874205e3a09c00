"""Counts of what the connector did, by name; cheap enough to keep always."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Named counts that only grow. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()
        self._new: Counter[str] = Counter()
        """Since the last `take`."""

    def add(self, name: str, amount: int = 1) -> None:
        """Raise the count `name` by `amount` (not negative)."""
        if amount:
            with self._lock:
                self._new[name] += amount

    def totals(self) -> dict[str, int]:
        """All counts since the start."""
        with self._lock:
            return dict(self._taken + self._new)

    def take(self) -> dict[str, int]:
        """What was counted since the last call of `take`."""
        if not self._new:
            # Every step asks, and most steps count nothing.
            return {}
        with self._lock:
            new, self._new = self._new, Counter()
            self._taken += new
            return dict(new)
