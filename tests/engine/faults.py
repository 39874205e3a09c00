"""Faults planted into an engine's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpool_connector import mooncake, transfer
from kvpool_connector.contract.status import Status

RIGHT = transfer.statuses_of


def _fail(position: Callable[[int], int]) -> None:
    """From now on one block of every read is lost: the one at `position(number of blocks)`."""

    def statuses_of(call: Any, keys: Sequence[str], *arguments: Any) -> list[Status]:
        statuses = RIGHT(call, keys, *arguments)
        if getattr(call, "__name__", "") == "get" and statuses:
            statuses[position(len(statuses))] = Status.MISS
        return statuses

    transfer.statuses_of = statuses_of  # type: ignore[assignment]


def fail_first() -> None:
    """The first block of every read is lost."""
    _fail(lambda count: 0)


def fail_middle() -> None:
    """One in the middle is lost."""
    _fail(lambda count: count // 2)


def fail_last() -> None:
    """The last one is lost."""
    _fail(lambda count: count - 1)


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
