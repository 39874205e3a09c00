"""From how many tokens on a hit is loaded: a number, or one learnt from measured times."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from clocks import ManualClock

from kvpool_connector.threshold import MAX_TOKENS, FixedThreshold, LearntThreshold, StepTimes

UNIT = 16
Cost = Callable[[int], float]
"""Seconds by tokens."""


def step(num_tokens: int) -> float:
    """A step of a model: 20 ms, and 0.1 ms a token."""
    return 0.020 + 1e-4 * num_tokens


def dear(num_tokens: int) -> float:
    """A store with a long way to it: worth it from about 550 tokens on."""
    return 0.050 + 1e-5 * num_tokens


def cheap(num_tokens: int) -> float:
    """Always worth it."""
    return 1e-4 + 1e-6 * num_tokens


def hopeless(num_tokens: int) -> float:
    """Never worth it."""
    return 0.5 + 2e-4 * num_tokens


class Always:
    """Planted: what a threshold must not be."""

    def __init__(self, loads: bool) -> None:
        self.loads = loads

    def worth(self, num_tokens: int) -> bool:
        return self.loads

    def loaded(self, num_tokens: int, seconds: float) -> None: ...

    def stepped(self, num_tokens: int, seconds: float) -> None: ...

    def looked_up(self, seconds: float) -> None: ...


def serve(learnt: LearntThreshold | Always, load: Cost, seed: int, num_requests: int = 3000) -> float:
    """Seconds beyond those of the better way for each of many hits, as part of those; after some to learn from."""
    random = Random(seed)
    spent = best = 0.0
    for number in range(num_requests):
        num_tokens = random.randrange(1, 2048 // UNIT) * UNIT
        noise = random.lognormvariate(0, 0.2)
        learnt.stepped(1, step(1) * noise)
        loading, computing = 1e-3 + load(num_tokens) * noise, (step(num_tokens + 1) - step(1)) * noise
        loads = learnt.worth(num_tokens)
        if loads:
            learnt.looked_up(1e-3)
            learnt.loaded(num_tokens, loading - 1e-3)
        else:
            learnt.stepped(num_tokens + 1, step(num_tokens + 1) * noise)
        if number >= 100:
            spent += loading if loads else computing
            best += min(loading, computing)
    return spent / best - 1


@pytest.mark.parametrize("load", [dear, cheap, hopeless])
@pytest.mark.parametrize("seed", range(3))
def test_g4_within_five_percent_of_the_better_of_loading_and_computing(load: Cost, seed: int) -> None:
    assert serve(LearntThreshold(UNIT), load, seed) < 0.05


@pytest.mark.parametrize(("loads", "load"), [(True, dear), (True, hopeless), (False, dear), (False, cheap)])
def test_g4_neither_way_alone_is(loads: bool, load: Cost) -> None:
    assert serve(Always(loads), load, 0) > 0.05


@pytest.mark.parametrize(("before", "after"), [(cheap, hopeless), (hopeless, cheap), (dear, cheap)])
def test_g4_a_store_that_becomes_slow_or_fast_is_noticed(before: Cost, after: Cost) -> None:
    learnt = LearntThreshold(UNIT)
    serve(learnt, before, 0)
    serve(learnt, after, 1, 6000)
    assert serve(learnt, after, 2) < 0.05


def test_the_number_is_where_the_ways_meet() -> None:
    learnt = LearntThreshold(UNIT)
    serve(learnt, dear, 0)
    # 0.051 + 1e-5 n = 1e-4 n
    assert learnt.tokens == pytest.approx(567, rel=0.25)
    serve(learnt, cheap, 0, 6000)
    assert learnt.tokens < 64
    serve(learnt, hopeless, 0, 6000)
    assert learnt.tokens == MAX_TOKENS + 1
    assert learnt.worth(MAX_TOKENS + 1)


def test_what_nothing_is_known_of_is_loaded_but_for_a_few_to_learn_from() -> None:
    learnt = LearntThreshold(UNIT)
    assert not learnt.known
    assert all(learnt.worth(320) for _ in range(100))
    for _ in range(3):
        learnt.loaded(320, 0.1)
    assert [learnt.worth(320) for _ in range(100)].count(False) == 4
    # Of another size nothing is known yet.
    assert learnt.worth(2000)


@pytest.mark.parametrize(("load_s", "expected"), [(0.2, 0), (0.01, 1000)])
def test_g4_an_engine_that_computes_prompts_of_one_length_alone_learns_too(load_s: float, expected: int) -> None:
    learnt = LearntThreshold(UNIT)
    loaded = 0
    for _ in range(1000):
        if learnt.worth(320):
            learnt.loaded(320, load_s)
            loaded += 1
        else:
            learnt.stepped(330, 0.05)
    # Both ways are tried now and then.
    assert loaded == pytest.approx(expected, abs=20)


def test_memory_is_bounded() -> None:
    learnt = LearntThreshold(UNIT)
    serve(learnt, dear, 0, 5000)
    for curve in (learnt.steps, learnt.loads):
        assert sum(map(len, curve._samples.values())) <= 15 * 14


def test_a_number_is_a_number() -> None:
    fixed = FixedThreshold(100)
    assert [fixed.worth(n) for n in (1, 99, 100, 101)] == [False, False, True, True]


def test_a_step_begins_when_the_one_before_it_has_ended() -> None:
    clock = ManualClock()
    steps = StepTimes(clock)
    steps.began(1, 100, usual=True)
    clock.time = 2.0
    steps.began(2, 50, usual=True)
    clock.time = 3.0
    assert steps.ended(1) == [(100, 3.0)]
    clock.time = 7.0
    assert steps.ended(2) == [(50, 4.0)]
    # An engine with nothing to do is not slow.
    clock.time = 100.0
    steps.began(3, 10, usual=True)
    clock.time = 101.0
    assert steps.ended(3) == [(10, 1.0)]


def test_of_steps_that_are_not_usual_or_not_told_of_nothing_is_measured() -> None:
    clock = ManualClock()
    steps = StepTimes(clock)
    for number in range(1, 100):
        steps.began(number, 10, usual=number != 99)
    assert steps.ended(98) == [(10, 0.0)]
    assert steps.ended(99) == []
