"""Learnt transfer takes the way that is faster, says the truth of every block, and loses little by looking."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from clocks import ManualClock

from kvpool_connector import learnt_transfer
from kvpool_connector.contract.status import Status
from kvpool_connector.learnt_transfer import FAILED_S, REGRET, SAMPLES, LearntTransfer, Preference, Way
from kvpool_connector.transfer import Hold, Unheld

OK = Status.OK


class Timed:
    """A way that takes a given time a block, and answers as it is told."""

    stored_bytes = 100

    def __init__(self, clock: ManualClock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.answer: Callable[[str], Status] = lambda key: OK
        self.moved: list[str] = []

    def save(self, keys: Sequence[str], block_ids: Sequence[int], hold: Hold) -> list[Status]:
        assert [f"k{i}" for i in block_ids] == list(keys)
        granted = hold.claim(block_ids)
        self.clock.time += self.seconds * len(keys)
        hold.release(block_ids)
        self.moved += keys
        return [self.answer(key) if leave else Status.WITHDRAWN for key, leave in zip(keys, granted, strict=True)]

    load = save


class Rig:
    """Both ways and the one that chooses."""

    def __init__(self, packed_s: float, direct_s: float) -> None:
        self.clock = ManualClock()
        self.packed, self.direct = Timed(self.clock, packed_s), Timed(self.clock, direct_s)
        self.transfer = LearntTransfer(self.packed, self.direct, self.clock)

    def load(self, count: int = 8, hold: Hold | None = None) -> list[Status]:
        ids = list(range(count))
        return self.transfer.load([f"k{i}" for i in ids], ids, hold or Unheld())

    @property
    def way(self) -> Way:
        return self.transfer.loads.way

    def learn(self) -> None:
        for _ in range(SAMPLES):
            self.load()


@pytest.mark.parametrize(
    ("packed_s", "direct_s", "way"),
    [(1.0, 0.5, "direct"), (1.0, 0.9, "direct"), (1.0, 0.97, "packed"), (1.0, 1.0, "packed"), (1.0, 9.0, "packed")],
)
def test_the_faster_way_is_taken(packed_s: float, direct_s: float, way: Way) -> None:
    rig = Rig(packed_s, direct_s)
    assert rig.way == "packed"
    rig.learn()
    assert rig.way == way
    taken = rig.packed if way == "packed" else rig.direct
    taken.moved.clear()
    rig.load(100)
    assert len(taken.moved) >= 99, "all but a trial goes the faster way"


def test_saves_and_loads_are_learnt_apart() -> None:
    rig = Rig(1.0, 0.5)
    rig.learn()
    assert (rig.transfer.loads.way, rig.transfer.saves.way) == ("direct", "packed")


def test_a_trial_is_one_block_either_way_and_the_rest_goes_the_usual_way() -> None:
    rig = Rig(1.0, 2.0)
    assert rig.load(5) == [OK] * 5
    assert (rig.packed.moved, rig.direct.moved) == (["k0", "k2", "k3", "k4"], ["k1"])


def test_a_single_block_is_no_trial() -> None:
    rig = Rig(1.0, 0.5)
    for _ in range(10):
        rig.load(1)
    assert (rig.way, rig.direct.moved) == ("packed", [])
    assert rig.load(0) == []


def test_one_slow_trial_changes_nothing() -> None:
    rig = Rig(1.0, 0.5)
    rig.learn()
    rig.direct.seconds = 30.0
    assert rig.transfer.loads.begin_trial() is False, "not affordable yet"
    rig.load(200)
    rig.direct.seconds = 0.5
    rig.learn()
    assert rig.way == "direct"


def test_a_way_that_has_become_slower_is_left() -> None:
    rig = Rig(1.0, 0.5)
    rig.learn()
    rig.direct.seconds = 3.0
    for _ in range(300):
        rig.load(16)
    assert rig.way == "packed"
    rig.direct.seconds = 0.5
    for _ in range(3000):
        rig.load(16)
    assert rig.way == "direct"


@pytest.mark.parametrize("seed", range(5))
def test_looking_costs_little(seed: int) -> None:
    rng = random.Random(seed)
    rig = Rig(1.0, rng.choice((0.2, 3.0, 20.0)))
    rig.learn()
    start, blocks = rig.clock.time, 0
    for _ in range(2000):
        count = rng.randrange(1, 64)
        blocks += count
        rig.load(count)
    best = blocks * min(rig.packed.seconds, rig.direct.seconds)
    # A trial is begun when what was lost before has been earned, so the last one comes on top.
    learning = (SAMPLES + 1) * abs(rig.packed.seconds - rig.direct.seconds)
    assert rig.clock.time - start <= best * (1 + 2 * REGRET) + learning, f"seed {seed}"


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.TIMEOUT, Status.INVALID])
def test_where_direct_alone_fails_packed_is_taken_at_once(status: Status) -> None:
    rig = Rig(1.0, 0.5)
    rig.learn()
    rig.load(int(4 / REGRET))
    rig.direct.answer = lambda key: status
    assert rig.load(5)[1] is status, "what happened to a block is said"
    assert rig.way == "packed"
    rig.direct.moved.clear()
    rig.load(int(FAILED_S / REGRET / 4))
    rig.load()
    assert rig.direct.moved == [], "not tried again for a while"


def test_an_outage_of_the_direct_way_is_not_waited_for_by_a_trial() -> None:
    rig = Rig(1.0, 0.5)
    rig.learn()
    rig.direct.answer = lambda key: Status.UNAVAILABLE
    rig.load(1)
    assert rig.way == "packed"


@pytest.mark.parametrize("way", ["packed", "direct"])
@pytest.mark.parametrize("status", [Status.MISS, Status.EXISTS, Status.WITHDRAWN, Status.CORRUPT])
def test_what_was_not_moved_says_nothing(way: str, status: Status) -> None:
    rig = Rig(1.0, 0.5)
    getattr(rig, way).answer = lambda key: status
    for _ in range(10):
        rig.load()
    assert (rig.way, list(rig.transfer.loads._ratios)) == ("packed", [])


def test_a_store_that_is_down_both_ways_says_nothing() -> None:
    rig = Rig(1.0, 0.5)
    rig.packed.answer = rig.direct.answer = lambda key: Status.UNAVAILABLE
    rig.load()
    assert not rig.transfer.loads._ratios


class Late(Unheld):
    """Leave that takes long to come, for the first who asks."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.seconds = 50.0

    def claim(self, block_ids: Sequence[int]) -> list[bool]:
        self.clock.time, self.seconds = self.clock.time + self.seconds, 0.0
        return [True] * len(block_ids)


def test_waiting_for_leave_is_no_transfer() -> None:
    rig = Rig(1.0, 2.0)
    for _ in range(SAMPLES):
        rig.load(hold=Late(rig.clock))
    assert rig.way == "packed"
    assert list(rig.transfer.loads._ratios) == [2.0] * SAMPLES


def test_nobody_tries_beside_another() -> None:
    preference = Preference()
    assert preference.begin_trial()
    assert not preference.begin_trial()
    preference.end_trial(OK, 1.0, OK, 0.5)
    assert preference.begin_trial()


def test_a_way_that_raises_ends_its_trial() -> None:
    rig = Rig(1.0, 0.5)

    def broken(key: str) -> Status:
        raise RuntimeError("broken")

    rig.direct.answer = broken
    with pytest.raises(RuntimeError, match="broken"):
        rig.load()
    rig.direct.answer = lambda key: OK
    rig.learn()
    assert rig.way == "direct"


def test_a_clock_that_stands_still_says_nothing() -> None:
    rig = Rig(0.0, 0.0)
    rig.learn()
    assert rig.way == "packed"


def test_a_preference_that_never_tries_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learnt_transfer.Preference, "begin_trial", lambda self: False)
    rig = Rig(1.0, 0.5)
    rig.learn()
    assert rig.way == "packed"
