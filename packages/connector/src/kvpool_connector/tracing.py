"""Spans of a request's lookup, load and saves. How they are sent is the engine's matter."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kvpool_connector.contract.status import Status

logger = logging.getLogger(__name__)

Headers = tuple[tuple[str, str], ...]
"""A request's trace context as it came with the request: W3C `traceparent` and `tracestate`; empty without one."""


@dataclass(frozen=True)
class Span:
    """A piece of time in a request's life. Times are nanoseconds since the epoch."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int]
    headers: Headers


Trace = Callable[[Span], None]
"""Takes a finished span, and returns at once."""


class Timer:
    """A span that has begun."""

    def __init__(self, trace: Trace, name: str, request_id: str, headers: Headers) -> None:
        self._trace = trace
        self._name = name
        self._request_id = request_id
        self._headers = headers
        self._start_ns = time.time_ns()

    def end(self, **attributes: str | int) -> None:
        """It ends now; `attributes` get the prefix `kvpool.`."""
        named: dict[str, str | int] = {f"kvpool.{name}": value for name, value in attributes.items()}
        named["kvpool.request_id"] = self._request_id
        try:
            self._trace(Span(self._name, self._start_ns, time.time_ns(), named, self._headers))
        except Exception:
            # Foreign code that watches: whatever breaks in it must not fail a user's request.
            logger.debug("event=trace_failed span=%s", self._name, exc_info=True)


class SaveSpan:
    """The span of one request's blocks of one step, on one rank, from the queue to the store."""

    def __init__(self, timer: Timer, num_blocks: int, rank: str) -> None:
        self._timer = timer
        self._num_blocks = num_blocks
        self._rank = rank
        self._counts: Counter[Status | None] = Counter()
        self._ended = False

    def count(self, statuses: Iterable[Status | None]) -> None:
        """How saves of blocks ended; None for those that the store did not decide."""
        self._counts.update(statuses)

    def end(self) -> None:
        """Nothing more of it will be saved. Blocks that were not counted are not stored. Once is enough."""
        if self._ended:
            return
        self._ended = True
        stored, present = self._counts[Status.OK], self._counts[Status.EXISTS]
        left = self._num_blocks - stored - present
        self._timer.end(blocks=self._num_blocks, stored=stored, present=present, not_stored=left, rank=self._rank)
