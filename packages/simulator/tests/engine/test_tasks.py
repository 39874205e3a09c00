"""Threads under control."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.engine import StuckError, Tasks, controlled


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    made = Tasks(VirtualClock(), 1)
    yield made
    made.close()


def imported() -> Any:
    """A module that has imported what connectors import."""
    module: Any = ModuleType("under_test")
    module.threading, module.queue, module.time = threading, queue, time
    module.ThreadPoolExecutor, module.wait = concurrent.futures.ThreadPoolExecutor, concurrent.futures.wait
    return module


def test_time_moves_only_when_all_wait(tasks: Tasks) -> None:
    seen: list[tuple[str, float]] = []

    def worker(name: str, seconds: float) -> None:
        tasks.sleep(seconds)
        seen.append((name, tasks.clock.now()))

    for name, seconds in (("late", 5.0), ("early", 2.0)):
        tasks.spawn(name, lambda n=name, s=seconds: worker(n, s))
    started = time.monotonic()
    assert tasks.wait(lambda: len(seen) == 2, 60.0)
    assert seen == [("early", 2.0), ("late", 5.0)]
    assert time.monotonic() - started < 1


def test_a_limit_ends_a_wait(tasks: Tasks) -> None:
    assert not tasks.wait(lambda: False, 3.0)
    assert tasks.clock.now() == 3.0


def test_a_wait_for_nothing_is_told(tasks: Tasks) -> None:
    tasks.spawn("other", lambda: tasks.wait(lambda: False))
    with pytest.raises(StuckError, match="other"):
        tasks.wait(lambda: False)


def test_an_error_of_a_task_reaches_the_first(tasks: Tasks) -> None:
    tasks.spawn("broken", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        tasks.sleep(1.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_decides_who_goes_on(seed: int) -> None:
    def order() -> list[str]:
        tasks, seen = Tasks(VirtualClock(), seed), []
        for name in "abcdef":
            tasks.spawn(name, lambda n=name: [(tasks.pause(), seen.append(n)) for _ in range(3)])
        tasks.wait(lambda: len(seen) == 18)
        tasks.close()
        return seen

    assert order() == order()


def test_other_seeds_decide_otherwise() -> None:
    orders = set()
    for seed in range(8):
        tasks, seen = Tasks(VirtualClock(), seed), []
        for name in "abc":
            tasks.spawn(name, lambda n=name, t=tasks, s=seen: (t.pause(), s.append(n)))
        tasks.wait(lambda s=seen: len(s) == 3)
        tasks.close()
        orders.add(tuple(seen))
    assert len(orders) > 2


def test_a_module_under_control_uses_virtual_time_alone(tasks: Tasks) -> None:
    module = imported()
    real = dict(vars(module))
    with controlled(tasks, [module]):
        condition, items = module.threading.Condition(), module.queue.SimpleQueue()
        with pytest.raises(queue.Empty):
            items.get(timeout=100.0)
        assert tasks.clock.now() == module.time.monotonic() == 100.0
        thread = module.threading.Thread(target=lambda: (module.time.sleep(50.0), items.put("here")), daemon=True)
        thread.start()
        assert items.get(timeout=60.0) == "here"
        thread.join(1.0)
        assert not thread.is_alive()
        pool = module.ThreadPoolExecutor(2, thread_name_prefix="pool")
        futures = [pool.submit(lambda s=s: (module.time.sleep(s), s)[1]) for s in (1.0, 2.0, 30.0)]
        done = module.wait(futures, timeout=5.0)
        assert {future.result() for future in done.done} == {1.0, 2.0}
        assert not futures[2].cancel()
        pool.shutdown()
        assert futures[2].result() == 30.0
        with condition:
            assert not condition.wait_for(lambda: False, 7.0)
        woken: list[float] = []

        def sleeper() -> None:
            with condition:
                condition.wait()
                woken.append(module.time.monotonic())

        module.threading.Thread(target=sleeper).start()
        module.time.sleep(1.0)
        with condition:
            condition.notify_all()
        tasks.wait(lambda: bool(woken))
    assert {name: value for name, value in vars(module).items() if name in real} == real


@pytest.mark.parametrize(("kind", "order"), [("SimpleQueue", "abc"), ("Queue", "abc"), ("LifoQueue", "cba")])
def test_queues_keep_their_order_and_wait_in_virtual_time(tasks: Tasks, kind: str, order: str) -> None:
    module = imported()
    with controlled(tasks, [module]):
        items = getattr(module.queue, kind)()
        for item in "abc":
            items.put(item)
        assert [items.get(timeout=1.0) for _ in "abc"] == list(order)
        with pytest.raises(queue.Empty):
            items.get(timeout=1e6)
    assert tasks.clock.now() == 1e6


@pytest.mark.parametrize("name", ["Semaphore", "BoundedSemaphore", "Barrier", "Timer"])
def test_what_waits_without_a_stand_in_is_refused(tasks: Tasks, name: str) -> None:
    module = imported()
    with controlled(tasks, [module]), pytest.raises(NotImplementedError, match=f"^{name} has no stand-in"):
        getattr(module.threading, name)(1)


def test_a_wait_that_was_imported_by_name_is_refused_too(tasks: Tasks) -> None:
    module = imported()
    module.as_completed = concurrent.futures.as_completed
    with controlled(tasks, [module]), pytest.raises(NotImplementedError, match=r"^as_completed has no stand-in"):
        module.as_completed([])


def test_every_kind_of_queue_has_a_stand_in_or_is_refused(tasks: Tasks) -> None:
    module = imported()
    with controlled(tasks, [module]):
        real = [name for name, value in vars(module.queue).items() if hasattr(value, "get") and name[0] != "_"]
    assert not real


def test_a_lock_keeps_others_out(tasks: Tasks) -> None:
    module = imported()
    inside: list[str] = []
    with controlled(tasks, [module]):
        lock = module.threading.Lock()

        def enter(name: str) -> None:
            with lock:
                inside.append(name)
                tasks.sleep(1.0)
                assert inside[-1] == name

        threads = [tasks.spawn(name, lambda n=name: enter(n)) for name in "abc"]
        for thread in threads:
            tasks.join(thread)
    assert sorted(inside) == ["a", "b", "c"]


def test_the_end_wakes_whoever_waits() -> None:
    tasks = Tasks(VirtualClock(), 0)
    ended: list[str] = []

    def forever() -> None:
        try:
            tasks.wait(lambda: False)
        finally:
            ended.append("unwound")

    task = tasks.spawn("forever", forever)
    tasks.sleep(1.0)
    tasks.close()
    assert ended == ["unwound"]
    assert task.done
