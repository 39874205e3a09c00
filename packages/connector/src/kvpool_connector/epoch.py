"""Epochs of a namespace: a reset begins the next one, and nothing that was stored before can be reached any more.

The epoch is in every key. That it has begun is said by a marker, an object of its own that the store does not evict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from kvpool_connector.contract.keys import Key
from kvpool_connector.contract.status import Status

MARKERS_PER_CALL = 256
"""Also how many markers in a row may be lost before the newest epoch is not found any more."""
MAX_CALLS = 16
"""A store that says yes to everything would be asked for ever."""


@lru_cache(256)
def marker(namespace: str, epoch: int) -> str:
    """Key of the object that is there once `epoch` has begun; epoch 0 needs none."""
    return str(Key(namespace, epoch, name="reset"))


def newest_epoch(exist: Callable[[Sequence[str]], list[Status]], namespace: str, known: int = 0) -> int:
    """The newest epoch that has begun, at least `known`; `known` where the store does not answer.

    Where more than `MAX_CALLS * MARKERS_PER_CALL` epochs have begun since, not the last: the next lookup asks on.
    """
    for _ in range(MAX_CALLS):
        statuses = exist([marker(namespace, known + i) for i in range(1, MARKERS_PER_CALL + 1)])
        begun = [i for i, status in enumerate(statuses, 1) if status.ok]
        if not begun:
            return known
        known += begun[-1]
    return known
