"""A store's answers in form: one status a key, whatever the store does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces

logger = logging.getLogger(__name__)


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
        logger.exception("event=store_raised call=%s keys=%d", getattr(call, "__name__", call), len(keys))
        return [Status.UNAVAILABLE] * len(keys)
    if not isinstance(statuses, list) or len(statuses) != len(keys):
        logger.error("event=store_out_of_form call=%s keys=%d", getattr(call, "__name__", call), len(keys))
        return [Status.UNAVAILABLE] * len(keys)
    return statuses
