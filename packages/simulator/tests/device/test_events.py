"""Work lands in order and in its time, and waits end."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.device import POISON, Stream, allocate, check, fill, rank_spec


def test_a_save_before_the_event_sees_poison() -> None:
    clock = VirtualClock()
    stream = Stream(clock)
    caches = allocate(rank_spec("tiny-qwen3-32b"), 4)
    name = caches.layer_names()[0]
    stream.launch(lambda: fill(caches, 2, "prefix"), duration_s=0.05)
    event = stream.record()
    assert set(caches.read(name, 1, 2)) == {POISON}
    clock.advance(0.049)
    assert not event.query()
    assert set(caches.read(name, 1, 2)) == {POISON}
    clock.advance(0.002)
    assert event.query()
    assert check(caches, 2, "prefix") == []


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.floats(0, 100))
def test_work_lands_in_order(durations: list[float], moved: float) -> None:
    clock = VirtualClock()
    stream = Stream(clock)
    landed: list[int] = []
    for i, duration in enumerate(durations):
        stream.launch(lambda i=i: landed.append(i), duration)  # type: ignore[misc]
    clock.advance(moved)
    stream.land()
    assert landed == [i for i in range(len(durations)) if sum(durations[: i + 1]) <= moved]
    assert stream.num_pending == len(durations) - len(landed)


def test_an_event_covers_only_what_was_queued_before_it() -> None:
    clock = VirtualClock()
    stream = Stream(clock, sleep=clock.advance)
    target = np.zeros(2, np.uint8)
    stream.write(target[:1], b"\1", 1.0)
    event = stream.record()
    stream.write(target[1:], b"\2", 1.0)
    assert event.wait(5.0)
    assert (clock.now(), target.tolist()) == (1.0, [1, 0])
    assert stream.synchronize(5.0)
    assert (clock.now(), target.tolist()) == (2.0, [1, 2])
    assert Stream(clock).record().query()


def test_an_event_is_not_over_before_its_work_has_landed() -> None:
    class Running(VirtualClock):
        """Time passes between two looks at it."""

        def now(self) -> float:
            found = super().now()
            self.advance(0.5)
            return found

    landed: list[int] = []
    stream = Stream(Running())
    stream.launch(lambda: landed.append(1), 1.0)
    event = stream.record()
    for _ in range(10):
        assert not event.query() or landed


def test_a_wait_ends_at_its_limit() -> None:
    clock = VirtualClock()
    stream = Stream(clock, sleep=clock.advance)
    stream.launch(lambda: None, math.inf)
    assert not stream.record().wait(3.0)
    assert clock.now() == 3.0


def test_a_clock_that_stands_still_hangs_nobody() -> None:
    stream = Stream(VirtualClock())
    stream.launch(lambda: None, 1.0)
    begin = time.monotonic()
    assert not stream.record().wait(0.02)
    assert time.monotonic() - begin < 5


def test_another_thread_moves_the_clock() -> None:
    clock = VirtualClock()
    stream = Stream(clock)
    stream.launch(lambda: None, 1.0)
    event, result = stream.record(), []
    thread = threading.Thread(target=lambda: result.append(event.wait(30.0)))
    thread.start()
    clock.advance(1.0)
    thread.join(20)
    assert result == [True]


def test_a_stream_waits_for_another() -> None:
    clock = VirtualClock()
    first, second = Stream(clock), Stream(clock)
    landed: list[str] = []
    first.launch(lambda: landed.append("first"), 2.0)
    second.wait_event(first.record())
    second.launch(lambda: landed.append("second"), 1.0)
    clock.advance(2.5)
    second.land()
    assert landed == ["first"]
    clock.advance(0.5)
    assert second.record().query()
    assert landed == ["first", "second"]


def test_misuse_is_refused_in_words() -> None:
    stream = Stream(VirtualClock())
    with pytest.raises(ValueError, match="duration_s must be 0 or more"):
        stream.launch(lambda: None, -1.0)
    with pytest.raises(ValueError, match="target has 2 bytes, data 1"):
        stream.write(np.zeros(2, np.uint8), b"x")
    with pytest.raises(ValueError, match="timeout_s must be 0 or more"):
        stream.record().wait(-1.0)
