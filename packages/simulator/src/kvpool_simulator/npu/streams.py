"""Streams and events of a simulated NPU: work waits in a queue until somebody waits for it.

Stricter than a device, which may finish at any time: here nothing runs before it is waited for, so that a forgotten
wait always shows as wrong bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], object]
BLOCKED = object()
"""What work returns that has to wait for another stream which does not get on."""


class BrokenRuleError(RuntimeError):
    """What a real NPU, its driver or its transport would refuse, crash on, or do wrong."""


class Clock:
    """How the devices get on with their work."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.local = threading.local()
        self.queries_until_landed = 2
        """Work has landed when an event was asked for so often."""
        self.hangs = False
        """Nothing ever lands."""

    @property
    def device(self) -> int:
        """The device of the calling thread. Raises `BrokenRuleError` where none was set: a thread inherits none."""
        found: int | None = getattr(self.local, "device", None)
        if found is None:
            raise BrokenRuleError(
                f"thread {threading.current_thread().name!r} has set no device; call torch.npu.set_device first"
            )
        return found


class Stream:
    """Work in order. As `torch.npu.Stream`."""

    def __init__(self, clock: Clock, device: int, default: bool = False) -> None:
        self.clock = clock
        self.index = device
        self.default = default
        self.hangs = False
        """Nothing that this stream has lands."""
        self._queue: deque[Work] = deque()
        self._queued = 0
        self._done = 0

    @property
    def queued(self) -> int:
        """Pieces of work so far."""
        return self._queued

    def append(self, work: Work) -> None:
        """Queue a piece of work."""
        with self.clock.lock:
            self._queue.append(work)
            self._queued += 1

    def landed(self, count: int) -> bool:
        """Whether the first `count` pieces of work are done."""
        return self._done >= count

    def advance(self, count: int) -> bool:
        """Do the first `count` pieces of work as far as the device gets; whether all of them are done."""
        with self.clock.lock:
            while self._done < count:
                if self.hangs or self.clock.hangs or self._queue[0]() is BLOCKED:
                    return False
                self._queue.popleft()
                self._done += 1
            return True

    def run(self, count: int) -> None:
        """Do the first `count` pieces of work. Raises `BrokenRuleError` where that would never end."""
        if not self.advance(count):
            raise BrokenRuleError("the device hangs, and this wait has no limit; poll an event instead")

    def synchronize(self) -> None:
        """Wait for all work."""
        self.run(self._queued)

    def query(self) -> bool:
        """Whether all work is done."""
        return self.landed(self._queued)

    def record_event(self, event: Event | None = None) -> Event:
        """See `torch.npu.Stream.record_event`."""
        event = event or Event(self.clock, lambda: self)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Work that is queued from now on waits for the event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Work that is queued from now on waits for the other stream's of now."""
        self.wait_event(stream.record_event())


class Event:
    """A point in a stream. As `torch.npu.Event`."""

    def __init__(self, clock: Clock, current_stream: Callable[[], Stream]) -> None:
        self._clock = clock
        self._current_stream = current_stream
        self._stream: Stream | None = None
        self._position = 0
        self._queries = 0

    def record(self, stream: Stream | None = None) -> None:
        """The work that the stream has now."""
        stream = stream or self._current_stream()
        if self._stream is not None and self._stream.index != stream.index:
            raise BrokenRuleError(
                f"an event of device {self._stream.index} was recorded on a stream of device {stream.index}"
            )
        self._stream, self._position, self._queries = stream, stream.queued, 0

    def _recorded(self, verb: str) -> Stream:
        if self._stream is None:
            raise BrokenRuleError(f"{verb} of an event that was never recorded: it waits for nothing; record it first")
        return self._stream

    def query(self) -> bool:
        """Whether the work has landed; it does while somebody asks."""
        stream = self._recorded("query()")
        self._queries += 1
        if self._queries > self._clock.queries_until_landed:
            stream.advance(self._position)
        return stream.landed(self._position)

    def wait(self, stream: Stream | None = None) -> None:
        """Work that the stream is given from now on waits for the event; the caller does not."""
        recorded, position = self._recorded("wait()"), self._position
        (stream or self._current_stream()).append(lambda: None if recorded.advance(position) else BLOCKED)

    def synchronize(self) -> None:
        """Wait, without a limit."""
        self._recorded("synchronize()").run(self._position)


@contextmanager
def switched(local: threading.local, stream: Stream | None) -> Iterator[None]:
    """Work of this thread goes to the stream."""
    before = getattr(local, "stream", None)
    if stream is not None:
        local.stream = stream
    try:
        yield
    finally:
        local.stream = before
