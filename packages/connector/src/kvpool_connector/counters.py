"""Counts of what the connector did, by name; cheap enough to keep always."""

from __future__ import annotations

import threading
from collections import defaultdict


class Counters:
    """Named counts that only grow. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: defaultdict[str, int] = defaultdict(int)
        self._new: defaultdict[str, int] = defaultdict(int)
        """Since the last `take`."""

    def add(self, name: str, amount: int = 1) -> None:
        """Raise the count `name` by `amount` (not negative)."""
        if amount:
            with self._lock:
                self._new[name] += amount

    def totals(self) -> dict[str, int]:
        """All counts since the start."""
        with self._lock:
            totals = dict(self._taken)
            for name, count in self._new.items():
                totals[name] = totals.get(name, 0) + count
            return totals

    def take(self) -> dict[str, int]:
        """What was counted since the last call of `take`."""
        if not self._new:
            # Every step asks, and most steps count nothing.
            return {}
        with self._lock:
            new, self._new = self._new, defaultdict(int)
            for name, count in new.items():
                self._taken[name] += count
            return dict(new)
