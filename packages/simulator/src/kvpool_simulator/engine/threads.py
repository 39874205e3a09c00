"""Drop-ins for `threading`, `queue` and `concurrent.futures` whose threads are tasks and whose time is virtual.

`controlled(tasks, modules)` puts them in place of the real ones in the modules under test, by identity: what a module
imported from the standard library is replaced, whatever it is called there. Nothing in those modules knows.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from kvpool_simulator.engine.tasks import Stopped, Task, Tasks


class ThreadKilled(BaseException):
    """A fault: the thread that it is raised in dies, as from an error nobody thought of."""


class Lock:
    """`threading.Lock` and, reentrant, `threading.RLock`."""

    def __init__(self, tasks: Tasks, reentrant: bool) -> None:
        self._tasks = tasks
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock`."""
        me = self._tasks._current
        mine = self._owner is None or (self._reentrant and self._owner is me)
        limit = None if timeout < 0 else timeout
        if not mine and not (blocking and self._tasks.wait(lambda: self._owner is None, limit)):
            return False
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        """See `threading.Lock`."""
        self._count -= 1
        if not self._count:
            self._owner = None

    def locked(self) -> bool:
        """See `threading.Lock`."""
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def put_down(self) -> tuple[Task | None, int]:
        """Let go of the lock however often it was taken, for the time of a wait."""
        held = self._owner, self._count
        self._owner, self._count = None, 0
        return held

    def take_up(self, held: tuple[Task | None, int]) -> None:
        """The inverse of `put_down`."""
        self._tasks.wait(lambda: self._owner is None)
        self._owner, self._count = held


class Condition:
    """`threading.Condition`."""

    def __init__(self, tasks: Tasks, lock: Lock | None = None) -> None:
        self._tasks = tasks
        self._lock = lock or Lock(tasks, reentrant=True)
        self._notified = 0
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition`; woken by any later `notify`."""
        before = self._notified
        return self._released(lambda: self._notified > before, timeout)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """See `threading.Condition`."""
        if not predicate():
            self._released(lambda: bool(predicate()), timeout)
        return predicate()

    def _released(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        held = self._lock.put_down()
        try:
            return self._tasks.wait(ready, timeout)
        finally:
            self._lock.take_up(held)

    def notify(self, n: int = 1) -> None:
        """See `threading.Condition`; who waits looks again."""
        self._notified += 1

    def notify_all(self) -> None:
        """See `threading.Condition`."""
        self._notified += 1


class Event:
    """`threading.Event`."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._flag = False

    def is_set(self) -> bool:
        """See `threading.Event`."""
        return self._flag

    def set(self) -> None:
        """See `threading.Event`."""
        self._flag = True

    def clear(self) -> None:
        """See `threading.Event`."""
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Event`."""
        return self._tasks.wait(self.is_set, timeout)


class SimpleQueue:
    """`queue.SimpleQueue` and `queue.Queue`."""

    def __init__(self, tasks: Tasks, maxsize: int = 0) -> None:
        self._tasks = tasks
        self._maxsize = maxsize
        self._items: deque[Any] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """See `queue.Queue`."""
        full = self._maxsize and len(self._items) >= self._maxsize
        if full and not (block and self._tasks.wait(lambda: len(self._items) < self._maxsize, timeout)):
            raise queue.Full
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See `queue.Queue`."""
        if not self._items and (not block or not self._tasks.wait(lambda: bool(self._items), timeout)):
            raise queue.Empty
        return self._take()

    def _take(self) -> Any:
        return self._items.popleft()

    def put_nowait(self, item: Any) -> None:
        """See `queue.Queue`."""
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        """See `queue.Queue`."""
        return self.get(block=False)

    def empty(self) -> bool:
        """See `queue.Queue`."""
        return not self._items

    def qsize(self) -> int:
        """See `queue.Queue`."""
        return len(self._items)


class LifoQueue(SimpleQueue):
    """`queue.LifoQueue`."""

    def _take(self) -> Any:
        return self._items.pop()


class Thread:
    """`threading.Thread`. An exception ends the thread alone, as in Python."""

    def __init__(
        self,
        tasks: Tasks,
        target: Callable[..., object],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self._tasks = tasks
        self._call = partial(target, *args, **(kwargs or {}))
        self.name = name
        self.daemon = daemon
        self.task: Task | None = None

    def start(self) -> None:
        """See `threading.Thread`."""

        def run() -> None:
            try:
                self._call()
            except Stopped:
                raise
            except BaseException as error:
                if not isinstance(error, ThreadKilled):
                    raise

        self.task = self._tasks.spawn(self.name, run)

    def join(self, timeout: float | None = None) -> None:
        """See `threading.Thread`."""
        if self.task is not None:
            self._tasks.wait(lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        """See `threading.Thread`."""
        return self.task is not None and not self.task.done


class Future:
    """`concurrent.futures.Future`, as far as those need it who hand work to an executor."""

    def __init__(self, tasks: Tasks, call: Callable[[], Any]) -> None:
        self._tasks = tasks
        self._call = call
        self._state = "pending"
        self._outcome: tuple[Any, BaseException | None] = (None, None)
        self._callbacks: list[Callable[[Future], object]] = []

    def run(self) -> None:
        """Do the work, unless it was cancelled."""
        if self._state != "pending":
            return
        self._state = "running"
        try:
            self._outcome = (self._call(), None)
        except Stopped:
            raise
        except BaseException as error:
            self._outcome = (None, error)
        self._finish("finished")

    def _finish(self, state: str) -> None:
        self._state = state
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """See `concurrent.futures.Future`."""
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def cancel(self) -> bool:
        """See `concurrent.futures.Future`."""
        if self._state == "pending":
            self._finish("cancelled")
        return self._state == "cancelled"

    def cancelled(self) -> bool:
        """See `concurrent.futures.Future`."""
        return self._state == "cancelled"

    def done(self) -> bool:
        """See `concurrent.futures.Future`."""
        return self._state in ("finished", "cancelled")

    def result(self, timeout: float | None = None) -> Any:
        """See `concurrent.futures.Future`."""
        value, error = self._settled(timeout)
        if error is not None:
            raise error
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `concurrent.futures.Future`."""
        return self._settled(timeout)[1]

    def _settled(self, timeout: float | None) -> tuple[Any, BaseException | None]:
        if not self._tasks.wait(self.done, timeout):
            raise TimeoutError
        if self.cancelled():
            raise concurrent.futures.CancelledError
        return self._outcome


class ThreadPoolExecutor:
    """`concurrent.futures.ThreadPoolExecutor`."""

    def __init__(self, tasks: Tasks, max_workers: int = 1, thread_name_prefix: str = "pool") -> None:
        self._tasks = tasks
        self._jobs: deque[Future] = deque()
        self._closed = False
        self._workers = [tasks.spawn(f"{thread_name_prefix}-{i}", self._work) for i in range(max_workers)]

    def _work(self) -> None:
        while self._tasks.wait(lambda: bool(self._jobs) or self._closed) and self._jobs:
            self._jobs.popleft().run()

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future:
        """See `concurrent.futures.ThreadPoolExecutor`."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future(self._tasks, lambda: call(*arguments, **named))
        self._jobs.append(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.ThreadPoolExecutor`."""
        self._closed = True
        if cancel_futures:
            for future in self._jobs:
                future.cancel()
        if wait:
            for worker in self._workers:
                self._tasks.join(worker)


def _wait_for_futures(tasks: Tasks) -> Callable[..., Any]:
    def wait(futures: Iterable[Future], timeout: float | None = None, return_when: str = "ALL_COMPLETED") -> Any:
        every = set(futures)
        enough = any if return_when == concurrent.futures.FIRST_COMPLETED else all
        if every:
            tasks.wait(lambda: enough(future.done() for future in every), timeout)
        done = {future for future in every if future.done()}
        return SimpleNamespace(done=done, not_done=every - done)

    return wait


WITHOUT_STAND_IN: tuple[Callable[..., Any], ...] = (
    threading.Barrier,
    threading.BoundedSemaphore,
    threading.Semaphore,
    threading.Timer,
    queue.PriorityQueue,
    concurrent.futures.ProcessPoolExecutor,
    concurrent.futures.as_completed,
)
"""What waits, and has no stand-in here."""


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*arguments: object, **named: object) -> Any:
        raise NotImplementedError(f"{name} has no stand-in in kvpool_simulator.engine.threads: write one")

    return refuse


def replacements(tasks: Tasks) -> dict[int, Any]:
    """What stands for what, by the identity of the real one."""

    def made(kind: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **named: kind(tasks, *arguments, **named)

    fakes = {
        threading.Thread: made(Thread),
        threading.Condition: made(Condition),
        threading.Event: made(Event),
        threading.Lock: lambda: Lock(tasks, reentrant=False),
        threading.RLock: lambda: Lock(tasks, reentrant=True),
        queue.SimpleQueue: made(SimpleQueue),
        queue.Queue: made(SimpleQueue),
        queue.LifoQueue: made(LifoQueue),
        concurrent.futures.ThreadPoolExecutor: made(ThreadPoolExecutor),
        concurrent.futures.wait: _wait_for_futures(tasks),
        time.monotonic: tasks.clock.now,
        time.sleep: tasks.sleep,
    }
    # A real wait would stop the whole simulation, and its limit would pass in real time.
    fakes |= {real: _refused(real.__name__) for real in WITHOUT_STAND_IN}
    by_identity: dict[int, Any] = {id(real): fake for real, fake in fakes.items()}
    for module in (threading, queue, concurrent.futures, time):
        stand_in = SimpleNamespace(**{name: getattr(module, name) for name in dir(module)})
        for name, value in vars(module).items():
            if id(value) in by_identity:
                setattr(stand_in, name, by_identity[id(value)])
        by_identity[id(module)] = stand_in
    return by_identity


@contextmanager
def controlled(tasks: Tasks, modules: Iterable[ModuleType]) -> Iterator[None]:
    """Within this context the modules' threads, locks, queues and clocks are those of `tasks`."""
    stand_ins = replacements(tasks)
    undo: list[tuple[ModuleType, str, Any]] = []
    try:
        for module in modules:
            for name, value in list(vars(module).items()):
                if id(value) in stand_ins:
                    undo.append((module, name, value))
                    setattr(module, name, stand_ins[id(value)])
        yield
    finally:
        for module, name, value in reversed(undo):
            setattr(module, name, value)
