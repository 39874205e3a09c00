"""Two ways side by side: ratios of interleaved repetitions, with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypedDict

Act = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table: a ratio, and what it should be."""

    area: str
    what: str
    against: str
    median: float
    low: float
    """The quarter of the repetitions with the smallest ratios lies below."""
    high: float
    repeats: int
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the median is where it should be; None for a row without a target."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return None if self.at_most is None else self.median <= self.at_most


def seconds(act: Act, clock: Callable[[], float] = time.perf_counter) -> float:
    """How long it takes, by `clock`."""
    start = clock()
    act()
    return clock() - start


def pairs(
    one: Act,
    other: Act,
    repeats: int,
    *,
    before_one: Act | None = None,
    before_other: Act | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Seconds of both, `repeats` times in turns, each first in every second turn; what comes `before` is not timed."""
    taken = []
    for i in range(repeats + 1):
        found = {}
        for mine, act, before in ((True, one, before_one), (False, other, before_other))[:: 1 if i % 2 else -1]:
            if before:
                before()
            found[mine] = seconds(act, clock)
        if i:  # The first turn fills caches.
            taken.append((found[True], found[False]))
    return taken


class Spread(TypedDict):
    """Fields of `Row` that come from repetitions."""

    median: float
    low: float
    high: float
    repeats: int


def spread(ratios: Iterable[float]) -> Spread:
    """Median, lower and upper quartile, and number, as `Row` wants them."""
    found = sorted(ratios)
    low, median, high = statistics.quantiles(found, n=4, method="inclusive")
    return {"median": round(median, 3), "low": round(low, 3), "high": round(high, 3), "repeats": len(found)}
