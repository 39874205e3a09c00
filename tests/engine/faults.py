"""Faults planted into an engine's process: what a store may do to a load, and what a connector must never do."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvpool_connector import mooncake, recent_saves, transfer
from kvpool_connector.contract.status import Status
from kvpool_connector.host import HostCopier

RIGHT = transfer.statuses_of
RIGHT_SCATTER = HostCopier.scatter
RIGHT_CALLS: dict[str, Any] = {}
"""What `count_calls` has replaced."""
CALLS: list[str] = []
READS_MAY_GO = threading.Event()
READ_LIMIT_S = 60.0


def heal() -> None:
    """No fault from now on."""
    while RIGHT_CALLS:
        setattr(mooncake.MooncakeStore, *RIGHT_CALLS.popitem())
    transfer.statuses_of = RIGHT
    HostCopier.scatter = RIGHT_SCATTER  # type: ignore[method-assign]
    READS_MAY_GO.set()


def count_calls() -> None:
    """Every call to the store is counted from now on, of both sides."""
    CALLS.clear()
    for name in ("exist", "put", "get", "remove", "write", "read"):
        right = RIGHT_CALLS[name] = getattr(mooncake.MooncakeStore, name)

        def counted(self: Any, *arguments: Any, _name: str = name, _right: Any = right, **named: Any) -> Any:
            CALLS.append(_name)
            return _right(self, *arguments, **named)

        setattr(mooncake.MooncakeStore, name, counted)


def remember_saves() -> None:
    """What went to a save is remembered for as long as a slow machine may take."""
    recent_saves.SAVE_MEMORY_S = 3600.0


def num_calls(engine: Any) -> int:
    """Calls since `count_calls`."""
    return len(CALLS)


def _lose(position: Callable[[int], int]) -> None:
    """From now on one block of every read is lost: the one at `position(number of blocks)`."""

    def statuses_of(call: Any, keys: Sequence[str], *arguments: Any) -> list[Status]:
        statuses = RIGHT(call, keys, *arguments)
        if getattr(call, "__name__", "") == "get" and statuses:
            statuses[position(len(statuses))] = Status.MISS
        return statuses

    transfer.statuses_of = statuses_of


def lose_first() -> None:
    """The first block of every read is lost, and the store says so."""
    _lose(lambda count: 0)


def lose_middle() -> None:
    """One in the middle is lost."""
    _lose(lambda count: count // 2)


def lose_last() -> None:
    """The last one is lost."""
    _lose(lambda count: count - 1)


def signal_at_third_read(pid: str, number: str) -> None:
    """A process, the master say, gets a signal right before the third read."""
    reads = itertools.count(1)

    def statuses_of(call: Any, keys: Sequence[str], *arguments: Any) -> list[Status]:
        if getattr(call, "__name__", "") == "get" and next(reads) == 3:
            os.kill(int(pid), int(number))
        return RIGHT(call, keys, *arguments)

    transfer.statuses_of = statuses_of


def slow_reads(seconds: str) -> None:
    """Every read takes so long."""

    def statuses_of(call: Any, keys: Sequence[str], *arguments: Any) -> list[Status]:
        if getattr(call, "__name__", "") == "get":
            # Against the real engine and store: the time that the engine measures is that of the clock.
            time.sleep(float(seconds))
        return RIGHT(call, keys, *arguments)

    transfer.statuses_of = statuses_of


def hold_reads() -> None:
    """Reads that begin from now on do not end before `let_reads_go`."""
    READS_MAY_GO.clear()

    def statuses_of(call: Any, keys: Sequence[str], *arguments: Any) -> list[Status]:
        if getattr(call, "__name__", "") == "get":
            assert READS_MAY_GO.wait(READ_LIMIT_S), "nobody called let_reads_go"
        return RIGHT(call, keys, *arguments)

    transfer.statuses_of = statuses_of


def let_reads_go() -> None:
    """The end of `hold_reads`."""
    READS_MAY_GO.set()


def _scatter(wrong: Callable[[Any, Sequence[int], int], None]) -> None:
    HostCopier.scatter = wrong  # type: ignore[assignment, method-assign]


def skip_first_block() -> None:
    """The first block of every load is said to be loaded and is not."""
    _scatter(lambda self, ids, address: RIGHT_SCATTER(self, ids[1:], address + self._object_bytes))


def skip_last_layer() -> None:
    """Of every block the last layer's page is not loaded."""

    def scatter(self: Any, ids: Sequence[int], address: int) -> None:
        numbers, objects = self._arrays(ids, address)
        for part, pages in self._pages[:-1]:
            pages[numbers] = objects[:, part].reshape(-1, *pages.shape[1:])

    _scatter(scatter)


def clear_objects_of(num_bytes: str) -> None:
    """Objects of this size arrive as zeros. (Not loading them might show nothing: an engine that computes the same
    again may find its own of before in the same blocks.)"""

    def scatter(self: Any, ids: Sequence[int], address: int) -> None:
        RIGHT_SCATTER(self, ids, address)
        for _, pages in self._pages if self._object_bytes == int(num_bytes) else ():
            pages[list(ids)] = 0

    _scatter(scatter)


def swap_layers() -> None:
    """The first two layers' pages are mistaken for each other."""

    def scatter(self: Any, ids: Sequence[int], address: int) -> None:
        numbers, objects = self._arrays(ids, address)
        for source, target in zip((1, 0, *range(2, len(self._pages))), range(len(self._pages)), strict=True):
            part, pages = self._pages[source][0], self._pages[target][1]
            pages[numbers] = objects[:, part].reshape(-1, *pages.shape[1:])

    _scatter(scatter)


def simulated_store() -> None:
    """The simulated store in place of Mooncake."""
    from kvpool_simulator import store

    mooncake.import_mooncake = lambda: store


def no_whole_puts() -> None:
    """The store takes no whole objects: what is saved went through sessions."""
    mooncake.MooncakeStore.put = lambda self, keys, *_: [Status.UNAVAILABLE] * len(keys)  # type: ignore[method-assign]


def no_whole_gets() -> None:
    """The store gives no whole objects: what is loaded came through sessions."""
    mooncake.MooncakeStore.get = lambda self, keys, *_: [Status.UNAVAILABLE] * len(keys)  # type: ignore[method-assign]


def no_sessions() -> None:
    """The store opens no sessions: what is saved and loaded went as whole objects."""
    for name in ("begin_put", "begin_get"):
        setattr(mooncake.MooncakeStore, name, lambda self, keys, *_: [Status.UNAVAILABLE] * len(keys))
