"""Streams and events: work that lands in order, when virtual time gets there, and waits that know a limit."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvpool_simulator.device.arena import Bytes


class Clock(Protocol):
    """Virtual time."""

    def now(self) -> float:
        """Seconds."""
        ...


class Stream:
    """Work of the device, one piece after the other, each taking its time.

    Nothing moves by itself: work that is due lands when somebody looks (`land`, or an event's `query` or `wait`).
    Memory read before that holds what was there before. Safe for threads.
    """

    # One lock for all streams: a stream that waits for another lands that one's work too, and orders must not cross.
    _lock = threading.RLock()

    def __init__(self, clock: Clock, sleep: Callable[[float], None] | None = None) -> None:
        """`sleep` is how a waiter lets `clock` move on; without it another thread must move the clock."""
        self.clock = clock
        self._sleep = sleep
        self._pending: deque[tuple[float, Callable[[], object]]] = deque()
        self._done_at = -math.inf

    def launch(self, work: Callable[[], None], duration_s: float = 0.0) -> None:
        """Queue `work`; it lands `duration_s` seconds after all before it, never if that is infinite."""
        if not duration_s >= 0:
            raise ValueError(f"duration_s must be 0 or more: found {duration_s}")
        with self._lock:
            self._queue(work, max(self._done_at, self.clock.now()) + duration_s)

    def write(self, target: Bytes, data: bytes | Bytes, duration_s: float = 0.0) -> None:
        """Queue a write of `data` into `target`, which must have as many bytes. `data` is copied now."""
        source = bytes(data)
        if len(source) != len(target):
            raise ValueError(f"target has {len(target)} bytes, data {len(source)}")

        def land() -> None:
            target[:] = memoryview(source)

        self.launch(land, duration_s)

    def wait_event(self, event: Event) -> None:
        """Let all later work of this stream come after `event`, of whatever stream."""
        with self._lock:
            self._queue(event.stream.land, max(self._done_at, event.done_at))

    def record(self) -> Event:
        """An event after all work queued until now."""
        with self._lock:
            return Event(self, max(self._done_at, self.clock.now()))

    def _queue(self, work: Callable[[], object], due: float) -> None:
        self._done_at = due
        self._pending.append((due, work))

    def land(self) -> int:
        """Let all work land that is due by now; how many pieces did."""
        landed = 0
        with self._lock:
            while self._pending and self._pending[0][0] <= self.clock.now():
                self._pending.popleft()[1]()
                landed += 1
        return landed

    @property
    def next_due(self) -> float | None:
        """When the next piece of work lands, in virtual seconds; None when there is none."""
        return self._pending[0][0] if self._pending else None

    @property
    def num_pending(self) -> int:
        """Pieces of work that have not landed."""
        return len(self._pending)

    def synchronize(self, timeout_s: float) -> bool:
        """Wait for all work queued until now; False past `timeout_s` seconds."""
        return self.record().wait(timeout_s)

    def pause(self, seconds: float) -> None:
        """Let a waiter's time pass, at most `seconds`."""
        if self._sleep is not None:
            self._sleep(seconds)
        else:
            time.sleep(min(seconds, 0.001))


class Event:
    """A point in a stream's work."""

    def __init__(self, stream: Stream, done_at: float) -> None:
        self.stream = stream
        self.done_at = done_at
        """Virtual time at which all work before it has landed, in seconds."""

    def query(self) -> bool:
        """True once all work before the event has landed."""
        # Looked at first: time that passes while work lands may make more of it due.
        due = self.done_at <= self.stream.clock.now()
        self.stream.land()
        return due

    def wait(self, timeout_s: float) -> bool:
        """True once all work before the event has landed; False past `timeout_s` seconds.

        The limit counts in virtual time and in real time, whichever is first: a clock that stands still hangs nobody.
        """
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s must be 0 or more: found {timeout_s}")
        clock = self.stream.clock
        virtual_end, real_end = clock.now() + timeout_s, time.monotonic() + timeout_s
        while not self.query():
            left = virtual_end - clock.now()
            if left <= 0 or time.monotonic() >= real_end:
                return False
            self.stream.pause(max(min(left, self.done_at - clock.now()), 0.0))
        return True
