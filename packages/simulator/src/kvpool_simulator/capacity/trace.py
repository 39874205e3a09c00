"""Request traces in the form of Mooncake's published ones: JSON lines with `timestamp` (ms), `input_length`,
`output_length` (tokens) and `hash_ids`, one for each block of 512 tokens; equal ids mean equal prefixes up to there."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOKENS_PER_ID = 512
MAX_LINE = 16 << 20
"""Characters; a request of a billion tokens has fewer."""


class TraceError(ValueError):
    """A line of a trace is not a request. The message names it by number."""


@dataclass(frozen=True)
class Request:
    """One line. `timestamp` in milliseconds, lengths in tokens."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def full_ids(self) -> tuple[int, ...]:
        """The ids of whole blocks: a partial one is not kept."""
        return self.hash_ids[: self.input_length // TOKENS_PER_ID]

    def to_json(self) -> str:
        """The line."""
        return json.dumps({**vars(self), "hash_ids": list(self.hash_ids)})


def read_trace(path: Path) -> list[Request]:
    """All requests, in order of time. Raises `TraceError` with the number of the first line that is wrong."""
    requests = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        # Whatever the path leads to, no more than this of a line is read.
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), ""), 1):
            if len(line) > MAX_LINE:
                raise TraceError(f"{path}, line {number}: more than {MAX_LINE} characters; found {line[:120]!r}")
            if not line.strip():
                continue
            try:
                requests.append(_parse(line))
            except (ValueError, TypeError, RecursionError) as error:
                raise TraceError(f"{path}, line {number}: {error}; found {line.strip()[:120]!r}") from error
    if not requests:
        raise TraceError(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.timestamp)


def _parse(line: str) -> Request:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise TypeError("expected a JSON object")
    numbers = []
    for name in ("timestamp", "input_length", "output_length"):
        value = found.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 53:
            raise TypeError(f"{name} is {value!r}; expected a number of at least 0")
        numbers.append(int(value))
    ids = found.get("hash_ids")
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 1 << 63 for i in ids):
        raise TypeError("hash_ids is not a list of whole numbers")
    if len(ids) < numbers[1] // TOKENS_PER_ID:
        raise ValueError(f"{len(ids)} hash_ids for {numbers[1]} tokens; expected one for every {TOKENS_PER_ID}")
    return Request(numbers[0], numbers[1], numbers[2], tuple(ids))


def sample_trace(num_requests: int, seed: int = 0, requests_per_s: float = 3.0) -> Iterator[Request]:
    """Made-up chats: sessions under a few system prompts, each turn the last one's prompt and more.

    Not a measurement of any service; for trying the tool where there is no trace of one's own.
    """
    dice = random.Random(seed)
    next_id = 0

    def fresh(count: int) -> list[int]:
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    systems = [fresh(dice.randint(1, 8)) for _ in range(20)]
    sessions: list[list[int]] = []
    now = 0.0
    for _ in range(num_requests):
        now += dice.expovariate(requests_per_s) * 1000
        if sessions and dice.random() < 0.6:
            # Mostly the sessions that were active last.
            index = max(0, len(sessions) - 1 - int(dice.expovariate(1 / 40)))
            ids = sessions.pop(index)
        else:
            ids = list(systems[min(int(dice.paretovariate(1.2)) - 1, len(systems) - 1)])
        ids += fresh(max(1, min(64, int(dice.lognormvariate(1.5, 1.0)))))
        sessions.append(ids)
        length = len(ids) * TOKENS_PER_ID - dice.randrange(TOKENS_PER_ID)
        yield Request(int(now), length, dice.randint(1, 1000), tuple(ids))
        if len(ids) > 240:
            sessions.pop()
