"""A store's answers in form: one status a key, whatever the store does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces
from kvpool_connector.loudness import Loudness

logger = logging.getLogger(__name__)

_loudness = Loudness()


def statuses_of(
    call: Callable[..., list[Status]], keys: Sequence[str], *arguments: Pieces | Sequence[int]
) -> list[Status]:
    """The store's statuses for `keys`; a store that raises or answers out of form counts as unavailable."""
    if not keys:
        return []
    try:
        statuses = call(keys, *arguments)
    except Exception:
        # The boundary to foreign code: whatever breaks in a store must not fail a user's request.
        _tell("event=store_raised", call, len(keys), with_trace=True)
        return [Status.UNAVAILABLE] * len(keys)
    if not isinstance(statuses, list) or len(statuses) != len(keys):
        _tell("event=store_out_of_form", call, len(keys))
        return [Status.UNAVAILABLE] * len(keys)
    return statuses


def _tell(event: str, call: Callable[..., object], num_keys: int, *, with_trace: bool = False) -> None:
    name = str(getattr(call, "__name__", type(call).__name__))
    level = _loudness.level(f"{event} {name}")
    logger.log(level, "%s call=%s keys=%d", event, name, num_keys, exc_info=with_trace)
