"""Threads that run one at a time, in an order that one seed decides, in virtual time.

Code under test keeps its threads, locks and time limits (see `kvpool_simulator.engine.threads`); here it is decided who
goes on at each place where a thread may wait. Time moves only when nobody can go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random

from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.device import Stream

STOP_LIMIT_S = 10.0
"""Real seconds that a thread may take to end when the simulation does."""


class Stopped(BaseException):
    """Raised in a thread that still waits when the simulation ends; no handler of `Exception` sees it."""


class StuckError(Exception):
    """Everybody waits, and for nothing that time brings: a wait without a limit, or a deadlock."""


class Task:
    """One thread under control."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: Callable[[], bool] | None = None
        """What it waits for; None while it may go on."""
        self.deadline = float("inf")
        self.done = False
        self.baton = threading.Lock()
        """Held, until it is this thread's turn; whoever hands over releases it. A lock, for the speed of it."""
        self.baton.acquire()
        self.thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Task({self.name!r})"


class Tasks:
    """All threads of one simulation. The thread that makes it is the first of them."""

    def __init__(self, clock: VirtualClock, seed: int = 0) -> None:
        self.clock = clock
        self.streams: list[Stream] = []
        """Devices whose work lands as time passes."""
        self.num_switches = 0
        self._random = Random(seed)
        self._main = Task("main")
        self._current = self._main
        self._tasks: list[Task] = [self._main]
        self._stopping = False
        self._failure: BaseException | None = None

    def stream(self) -> Stream:
        """A device's queue of work; whoever waits for it lets this simulation's time pass."""
        stream = Stream(self.clock, self.sleep)
        self.streams.append(stream)
        return stream

    def spawn(self, name: str, run: Callable[[], object]) -> Task:
        """Start a thread; it first runs when this one waits."""
        task = Task(name)

        def body() -> None:
            task.baton.acquire()
            try:
                if not self._stopping:
                    run()
            except Stopped:
                pass
            except BaseException as error:
                # An engine's own failure ends the simulation; connector threads are ended by `threads.Thread`.
                self._failure = self._failure or error
            finally:
                task.done = True
                self._tasks.remove(task)
                self._hand_over(self._next())

        task.thread = threading.Thread(target=body, name=f"simulated-{name}", daemon=True)
        self._tasks.append(task)
        task.thread.start()
        return task

    def wait(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Let others go on until `ready()`; False when `timeout_s` virtual seconds passed first."""
        if not ready():
            self._wait(ready, timeout_s)
        return ready()

    def sleep(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass, and others go on meanwhile."""
        self._wait(lambda: False, seconds)

    def pause(self) -> None:
        """A place where another thread may go on first."""
        self._wait(lambda: True, None)

    def join(self, task: Task) -> None:
        """Wait for a thread's end."""
        self.wait(lambda: task.done)

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        if self._stopping:
            raise Stopped
        task = self._current
        task.ready = ready
        task.deadline = float("inf") if timeout_s is None else self.clock.now() + timeout_s
        following = self._next()
        if following is not task:
            self._hand_over(following)
            task.baton.acquire()
        task.ready, task.deadline = None, float("inf")
        if self._stopping:
            raise Stopped
        if task is self._main and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _hand_over(self, task: Task) -> None:
        self.num_switches += 1
        self._current = task
        task.baton.release()

    def _next(self) -> Task:
        """Who goes on; moves time when nobody can."""
        if self._stopping:
            return self._main
        while self._failure is None:
            now = self.clock.now()
            able = [task for task in self._tasks if task.ready is None or task.deadline <= now or task.ready()]
            if able:
                return able[0] if len(able) == 1 else self._random.choice(able)
            due = min((task.deadline for task in self._tasks), default=float("inf"))
            due = min([due, *(at for stream in self.streams if (at := stream.next_due) is not None)])
            if due == float("inf"):
                waiting = ", ".join(task.name for task in self._tasks)
                self._failure = StuckError(f"all wait without a limit, for nothing that time brings: {waiting}")
                break
            self.clock.advance(max(0.0, due - now))
            for stream in self.streams:
                stream.land()
        return self._main

    def close(self) -> None:
        """End every thread: whoever waits gets `Stopped`."""
        self._stopping = True
        for task in self._tasks[:]:
            if task is not self._main and task.thread is not None:
                self._current = task
                task.baton.release()
                self._main.baton.acquire(timeout=STOP_LIMIT_S)
                task.thread.join(STOP_LIMIT_S)
        alive = [task.name for task in self._tasks if task is not self._main]
        if alive:
            raise StuckError(f"threads did not end with the simulation: {alive}")
