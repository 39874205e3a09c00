"""Connectors with one mistake each, which the cluster must find within 50 seeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvpool_connector import events, fence, loader, saver, scheduler, tracker, worker
from kvpool_connector.contract import shards, topology
from kvpool_connector.contract.status import Status

FOUND_AT = {
    "a hit is one block too long": 7,
    "a sliding window is one block short": 2,
    "a load does not wait for steps in flight": 73,
    "a reset resets nothing": 12,
    "blocks are saved on top of a load that may have failed": 59,
    "blocks of failed loads stay in the engine's cache": 73,
    "keys do not tell adapters and salts apart": 7,
    "loads that failed between steps count as loaded": 13,
    "routers are never told of the first block of a prompt": 2,
    "routers are told of a block with its first shard": 7,
    "the last token of an answer is taken as computed": 21,
    "the local hit is loaded in place of what follows": 13,
    "what the store refused is told to routers": 2,
    "whatever was looked up is a hit": 2,
}
"""Seeds that showed a mistake when it was planted: they are tried first, so that the search is short."""
BREAKAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
"""By what is wrong: makes the mistake while the context lasts."""


def plant(mistake: str, owner: Any, name: str, wrong: Any) -> None:
    """`owner.name` is `wrong`."""
    BREAKAGES[mistake] = lambda: patch.object(owner, name, wrong)


def wrap(mistake: str, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """The same with a function whose first argument is the right one."""
    right = getattr(owner, name)
    plant(mistake, owner, name, lambda *a, **k: wrong(right, *a, **k))


class Landed:
    """An event that has always happened."""

    def wait(self, timeout_s: float) -> bool:
        return True


def unconfirmed_ignored(right: Any, self: Any, *arguments: Any, **named: Any) -> Any:
    self._unconfirmed.clear()
    return right(self, *arguments, **named)


def rejected_saved(right: Any, self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
    computed = request.num_computed_tokens
    request.num_computed_tokens = computed + 16
    try:
        return right(self, request, *arguments, **named)
    finally:
        request.num_computed_tokens = computed


def half_told(right: Any, self: Any, stored: Any, present: Any) -> None:
    for key in stored:
        if whole := self._blocks_of.get(key):
            self._waiting[whole].missing &= {key}
    right(self, stored, present)


def misplaced(right: Any, self: Any, view: Any, tables: Any, num_external_tokens: int) -> Any:
    """The chunk list starts at the prompt's start, not behind the local hit."""
    hit = self._hits.get(view.request_id)
    if hit is not None and num_external_tokens:
        self._hits[view.request_id] = replace(hit, num_computed_tokens=0)
    return right(self, view, tables, num_external_tokens)


def reset_forgets(right: Any, self: Any) -> bool:
    shards, self._shards = self._shards, None
    try:
        return bool(right(self))
    finally:
        self._shards = shards


plant("the fence lets every step overwrite at once", fence.Fence, "overwrite", lambda self, block_ids: 0)
wrap(
    "what a load will overwrite is not told to the fence",
    scheduler.PoolScheduler,
    "build_step",
    lambda right, self, scheduled: replace(right(self, scheduled), overwritten=frozenset()),
)
wrap(
    "a save does not wait for the device",
    saver.Saver,
    "submit",
    lambda right, self, saves, event: right(self, saves, Landed()),
)
wrap(
    "a load does not wait for steps in flight",
    loader.Loader,
    "start",
    lambda right, self, request_id, loads, event: right(self, request_id, loads, Landed()),
)
wrap(
    "a hit is one block too long",
    scheduler.PoolScheduler,
    "_boundary",
    lambda right, self, view, local: (
        found + self._alignment
        if local < (found := right(self, view, local)) and found + self._alignment < view.num_tokens
        else found
    ),
)
plant(
    "blocks of failed loads stay in the engine's cache",
    scheduler.PoolScheduler,
    "_evict_failed",
    lambda self, failed: None,
)
wrap(
    "the last token of an answer is taken as computed",
    scheduler.PoolScheduler,
    "finished",
    lambda right, self, request_id, num_tokens, **named: right(self, request_id, num_tokens + 1, **named),
)
plant("ranks that hold one KV head share a state's key", topology.Topology, "with_heads", lambda self, num_heads: self)
plant("a sliding window is one block short", tracker.GroupRule, "first_needed", lambda self, b: b // self.block_size)
wrap(
    "failed blocks are not reported",
    loader.Load,
    "failed_blocks",
    lambda right, self: ([], right(self)[1]),
)
wrap(
    "only the first failed block is reported",
    loader.Load,
    "failed_blocks",
    lambda right, self: (right(self)[0][-1:], right(self)[1]),
)
wrap(
    "ranks other than the first report no failed block",
    worker.PoolWorker,
    "take_failed_blocks",
    lambda right, self: set() if self._rank.tp else right(self),
)
wrap(
    "blocks are saved on top of a load that may have failed",
    scheduler.PoolScheduler,
    "_due",
    unconfirmed_ignored,
)
wrap("a reset resets nothing", scheduler.PoolScheduler, "reset", reset_forgets)
wrap("blocks are saved that the step does not complete", scheduler.PoolScheduler, "_due", rejected_saved)
wrap("the local hit is loaded in place of what follows", scheduler.PoolScheduler, "allocated", misplaced)
wrap(
    "keys do not tell adapters and salts apart",
    shards.Shard,
    "keys",
    lambda right, self, block_hashes, tag: right(self, block_hashes, ""),
)
wrap(
    "whatever was looked up is a hit",
    scheduler.PoolScheduler,
    "_obstacle",
    lambda right, self, boundary, local, present: None,
)
wrap(
    "ended requests are remembered",
    scheduler.PoolScheduler,
    "finished",
    lambda right, self, request_id, num_tokens, completed: False,
)
wrap(
    "a resumed request keeps a block that it gave back",
    tracker.RequestTracker,
    "replace_blocks",
    lambda right, self, block_ids: setattr(
        self, "block_ids", [[*old[:1], *new[1:]] for old, new in zip(self.block_ids, block_ids, strict=True)]
    ),
)
wrap(
    "loads between steps are never told to have ended",
    worker.PoolWorker,
    "take_loaded",
    lambda right, self: (set(), set()),
)
wrap(
    "loads that failed between steps count as loaded",
    worker.PoolWorker,
    "take_loaded",
    lambda right, self: (right(self)[0], set()),
)
wrap("routers are told of a block with its first shard", events.BlockEvents, "saved", half_told)
wrap(
    "what the store refused is told to routers",
    events.StoredKeys,
    "note",
    lambda right, self, keys, statuses: right(self, keys, [Status.OK] * len(keys)),
)
wrap(
    "routers are never told of the first block of a prompt",
    events.BlockEvents,
    "expect",
    lambda right, self, keys, block: right(self, keys, block) if block.parent else None,
)
