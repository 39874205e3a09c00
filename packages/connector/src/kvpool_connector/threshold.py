"""From how many tokens on loading is faster than computing: a number that a user gives, or one learnt at run time."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Protocol

from kvpool_connector.contract.clock import Clock

MAX_TOKENS = 8192
"""No more than this is ever computed that could be loaded, however the measurements look."""
SAMPLES = 15
"""Kept of each range of sizes: the median of so few follows a change soon, and no single slow one counts."""
ENOUGH = 3
"""Samples without which a range of sizes says nothing."""
TRIALS = 4
"""Hits that are computed, at most, because nothing is known of computing yet."""
CHANGED = 2.0
"""Times that loads must differ from what is known for all that is known to be forgotten."""
REFRESH = 8
"""Steps after which the threshold is worked out anew; and after every load."""
REGRET = 0.02
"""Part of the time spent that may go into trying the way that looks slower: it may have become the faster one."""
TRY_EVERY = 10
"""Decisions between two such trials, at least."""


class Threshold(Protocol):
    """Decides whether tokens are loaded."""

    @property
    def tokens(self) -> int:
        """From this many tokens on they are loaded, trials apart."""
        ...

    def worth(self, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens in the pool should be loaded, or asked for."""
        ...


class FixedThreshold:
    """A number that a user gave."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def worth(self, num_tokens: int) -> bool:
        """See `Threshold`."""
        return num_tokens >= self.tokens


class Curve:
    """Seconds by number of tokens, as measured: medians of the latest samples, one for each power of two of tokens."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=SAMPLES))

    def add(self, num_tokens: int, seconds: float) -> None:
        """One measurement."""
        self._samples[num_tokens.bit_length()].append((num_tokens, seconds))

    def knows(self, num_tokens: int) -> bool:
        """Whether there are enough measurements about this size."""
        return len(self._samples.get(num_tokens.bit_length(), ())) >= ENOUGH

    def points(self) -> list[tuple[float, float]]:
        """(tokens, seconds), ascending in tokens."""
        return [
            (statistics.median(tokens for tokens, _ in samples), statistics.median(s for _, s in samples))
            for _, samples in sorted(self._samples.items())
            if len(samples) >= ENOUGH
        ]


def at(points: Sequence[tuple[float, float]], num_tokens: float) -> float:
    """Seconds at `num_tokens`: straight lines between points and beyond the last; as at the first below it."""
    if len(points) == 1:
        ((tokens, seconds),) = points
        return seconds * max(1.0, num_tokens / tokens)
    if num_tokens <= points[0][0]:
        return points[0][1]
    right = next((i for i, (tokens, _) in enumerate(points) if tokens >= num_tokens), len(points) - 1)
    (t0, s0), (t1, s1) = points[right - 1], points[right]
    return max(s0 + (s1 - s0) * (num_tokens - t0) / (t1 - t0), min(s0, s1))


class StepTimes:
    """How long steps take, with several of them under way at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun: deque[tuple[int, float, int, bool]] = deque(maxlen=64)
        self._last_end = float("-inf")

    def began(self, number: int, num_tokens: int, *, usual: bool) -> None:
        """A step of so many tokens was scheduled; one that is not `usual` is not measured."""
        self._begun.append((number, self._clock.now(), num_tokens, usual))

    def ended(self, number: int) -> list[tuple[int, float]]:
        """The step `number` has ended, and those before it: tokens and seconds, if it is measured.

        A step that was scheduled while another was under way began when that ended.
        """
        now, found = self._clock.now(), []
        while self._begun and self._begun[0][0] <= number:
            this, began, num_tokens, usual = self._begun.popleft()
            if this == number and usual:
                found.append((num_tokens, now - max(began, self._last_end)))
        self._last_end = now
        return found


class LearntThreshold:
    """Learnt from the times of loads, of lookups and of steps.

    A step of n tokens less one of a single token is what computing n tokens more costs: the token after a hit has to
    be computed anyway. Both ways are tried now and then, the one that looks slower as often as `REGRET` allows.
    """

    def __init__(self, unit: int) -> None:
        """`unit`: tokens that loads come in multiples of."""
        self._unit = unit
        self.loads, self.steps = Curve(), Curve()
        self._surprise: deque[float] = deque(maxlen=ENOUGH)
        self._lookups: deque[float] = deque(maxlen=SAMPLES)
        self._num_new = 0
        self._load_points: list[tuple[float, float]] = []
        self._step_points: list[tuple[float, float]] = []
        self._tokens = unit
        self._trials = 0
        self._credit_s = 0.0

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """A load of so many tokens took so long, on the slowest rank."""
        if self._load_points:
            self._surprise.append(seconds / max(at(self._load_points, num_tokens), 1e-9))
            if len(self._surprise) == ENOUGH and not 1 / CHANGED < statistics.median(self._surprise) < CHANGED:
                # Where loads are rare, old ones would outweigh the new ones of all sizes for a long time.
                self._surprise.clear()
                self.loads = Curve()
        self.loads.add(num_tokens, seconds)
        self._num_new += REFRESH

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """A step that computed so many tokens, and waited for no load, took so long."""
        self.steps.add(num_tokens, seconds)
        self._num_new += 1

    def looked_up(self, seconds: float) -> None:
        """A lookup took so long."""
        self._lookups.append(seconds)

    @property
    def tokens(self) -> int:
        """From this many tokens on loading looks faster; one unit as long as too little is known."""
        self._refresh()
        return self._tokens

    def worth(self, num_tokens: int) -> bool:
        """See `Threshold`."""
        if num_tokens > MAX_TOKENS:
            return True
        self._refresh()
        if not self.loads.knows(num_tokens):
            return True
        # An engine may only ever compute whole prompts of one length: what those take is what computing takes at most.
        if len(self._step_points) < 2 and not any(tokens > num_tokens for tokens, _ in self._step_points):
            self._trials += 1
            return self._trials > TRIALS
        load, compute = self.load_s(num_tokens), self.compute_s(num_tokens)
        loads = num_tokens >= self._tokens if self.known else load <= compute
        taken, other = (load, compute) if loads else (compute, load)
        self._credit_s += REGRET * taken
        if self._credit_s < max(other - taken, TRY_EVERY * REGRET * taken):
            return loads
        self._credit_s = 0.0
        return not loads

    def load_s(self, num_tokens: int) -> float:
        """Seconds of looking up and loading so many tokens, as far as known."""
        return at(self._load_points, num_tokens) + (statistics.median(self._lookups) if self._lookups else 0.0)

    def compute_s(self, num_tokens: int) -> float:
        """Seconds of computing so many tokens more in a step, as far as known."""
        least = at(self._step_points, 1) if len(self._step_points) > 1 else 0.0
        return max(0.0, at(self._step_points, num_tokens + 1) - least)

    @property
    def known(self) -> bool:
        """Whether `tokens` rests on measurements of both ways."""
        self._refresh()
        return bool(self._load_points) and len(self._step_points) > 1

    def _refresh(self) -> None:
        if self._num_new < REFRESH:
            return
        self._num_new = 0
        self._load_points, self._step_points = self.loads.points(), self.steps.points()
        if not self.known:
            return
        # From above: a size from which on loading is always faster.
        self._tokens, size = MAX_TOKENS + 1, MAX_TOKENS // self._unit * self._unit
        while size >= self._unit and self.load_s(size) <= self.compute_s(size):
            self._tokens = size
            size -= max(self._unit, size // 16 // self._unit * self._unit)
