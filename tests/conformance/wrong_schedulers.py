"""Mistakes of the scheduler side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kvpool_connector import scheduler, tracker
from kvpool_connector.contract import shards
from kvpool_connector.contract.status import Status
from kvpool_connector.metadata import StepMetadata
from kvpool_connector.scheduler import PoolScheduler
from tests.conformance.wrong_sides import plant, wrap

# Lookup: what counts as a hit.

LEADING_RUN = "test_scheduler:test_a18_g1_a_hit_is_the_leading_run_beyond_the_local_hit"
ONE_LEFT = "test_scheduler:test_d8_at_least_one_token_is_left_to_compute"
GROUPS = "test_scheduler:TestSeveralGroups"
HOLE: dict[str, Any] = {"present": [0, 2, 3], "local": 0, "expected": 16}

plant(
    "a hit is a sum, not a leading run",
    PoolScheduler,
    "_obstacle",
    lambda self, boundary, local, present: next(
        (
            (group, boundary // rule.block_size - 1)
            for group, (rule, blocks) in enumerate(zip(self._rules, present, strict=True))
            if sum(blocks) * rule.block_size < boundary - local
        ),
        None,
    ),
    LEADING_RUN,
    **HOLE,
)
plant(
    "a hole in the middle is ignored: the last block decides",
    PoolScheduler,
    "_obstacle",
    lambda self, boundary, local, present: next(
        (
            (group, boundary // rule.block_size - 1)
            for group, (rule, blocks) in enumerate(zip(self._rules, present, strict=True))
            if not blocks[(boundary - local) // rule.block_size - 1]
        ),
        None,
    ),
    LEADING_RUN,
    **HOLE,
)
plant("whatever was asked for is a hit", PoolScheduler, "_obstacle", lambda *_: None, LEADING_RUN, **HOLE)
wrap(
    "a hit is one block too long",
    PoolScheduler,
    "_boundary",
    lambda right, self, view, local: right(self, view, local) + 16,
    LEADING_RUN,
    present=[0, 1, 2],
    local=0,
    expected=48,
)
wrap(
    "a hit is one block too short",
    PoolScheduler,
    "_boundary",
    lambda right, self, view, local: max(local, right(self, view, local) - 16),
    LEADING_RUN,
    present=[0, 1, 2],
    local=0,
    expected=48,
)
wrap(
    "a hit counts from the prompt's start, not from the local hit",
    PoolScheduler,
    "_boundary",
    lambda right, self, view, local: max(local, right(self, view, 0)),
    LEADING_RUN,
    present=[1, 2],
    local=16,
    expected=32,
)
wrap(
    "the whole prompt is taken as hit",
    PoolScheduler,
    "_boundary",
    lambda right, self, view, local: right(self, replace(view, num_tokens=view.num_tokens + 1), local),
    ONE_LEFT,
    num_tokens=64,
    expected=48,
)
wrap(
    "the local hit is asked for too",
    PoolScheduler,
    "_boundary",
    lambda right, self, view, local: right(self, replace(view, num_tokens=view.num_tokens + 16), local),
    "test_scheduler:test_g1_nothing_is_asked_when_the_local_hit_covers_all",
)


def one_shard(position: int) -> Callable[..., int]:
    """A lookup in which the answer for one shard of each block stands for all of them."""

    def boundary(right: Any, self: PoolScheduler, view: Any, local: int) -> int:
        assert self._shards is not None
        lookup, num_shards = self._lookup, len(self._shards.shards(0))

        def exist(keys: Sequence[str]) -> list[Status]:
            statuses = lookup.exist(keys)
            return [statuses[i // num_shards * num_shards + position % num_shards] for i in range(len(statuses))]

        self._lookup = SimpleNamespace(exist=exist)
        try:
            return int(right(self, view, local))
        finally:
            self._lookup = lookup

    return boundary


EVERY_SHARD = "test_scheduler:test_b1_a_block_counts_only_when_every_shard_is_there"
wrap("the first shard answers for all", PoolScheduler, "_boundary", one_shard(0), EVERY_SHARD)
wrap("the last shard answers for all", PoolScheduler, "_boundary", one_shard(-1), EVERY_SHARD)
wrap(
    "keys without adapter and salt",
    shards.ShardMap,
    "keys",
    lambda right, self, group, block_hashes, tag="": right(self, group, block_hashes),
    "test_scheduler:test_b3_adapters_and_salts_do_not_share",
)
wrap(
    "requests whose content hashes do not stand for are looked up",
    PoolScheduler,
    "num_matched_tokens",
    lambda right, self, view, local: right(self, replace(view, poolable=True), local),
    "test_scheduler:test_b3_requests_that_hashes_do_not_stand_for_are_left_alone",
)
MEMORY = "test_scheduler:test_d7_d24_asking_again_is_idempotent_and_asks_the_store_once"
plant("a lookup is remembered for ever", scheduler, "HIT_MEMORY_S", 1e9, MEMORY)
plant("the store is asked at every call", scheduler, "HIT_MEMORY_S", 0.0, MEMORY)
wrap(
    "a consumer's role is ignored",
    PoolScheduler,
    "__init__",
    lambda right, self, *a, loads=True, **k: right(self, *a, **k),
    "test_scheduler:test_consumers_and_producers",
)

# Several groups.

wrap(
    "the block size of group 0 for all groups",
    PoolScheduler,
    "_hashes",
    lambda right, self, view, rule, start, end: [
        right(self, view, self._rules[0], i, i + 1)[0] for i in range(start, end)
    ],
    f"{GROUPS}.test_loads_skip_blocks_outside_the_window_and_run_between_steps",
)
plant(
    "a sliding window is taken for full attention",
    tracker.GroupRule,
    "first_needed",
    lambda self, boundary: 0,
    f"{GROUPS}.test_the_hit_is_the_minimum_by_each_groups_rule",
)
plant(
    "the window is forgotten and the last block alone decides",
    tracker.GroupRule,
    "first_needed",
    lambda self, boundary: boundary // self.block_size - 1,
    f"{GROUPS}.test_a20_a_longer_stored_key_implies_no_shorter_boundary",
)
wrap(
    "several groups load within the step",
    PoolScheduler,
    "num_matched_tokens",
    lambda right, *a: (right(*a)[0], False),
    f"{GROUPS}.test_the_hit_is_the_minimum_by_each_groups_rule",
)
WINDOW = f"{GROUPS}.test_a7_blocks_of_a_window_are_saved_in_the_step_that_completes_them_or_never"
wrap(
    "blocks that left the window are saved",
    PoolScheduler,
    "_due",
    lambda right, self, request, start, final=False: right(self, request, 0, final),
    WINDOW,
)


def rounded_up(right: Any, self: PoolScheduler, request: Any, start: int, final: bool = False) -> Any:
    computed = request.num_computed_tokens
    request.num_computed_tokens = -(-computed // 16) * 16
    try:
        return right(self, request, start, final)
    finally:
        request.num_computed_tokens = computed


wrap("a partial block is saved", PoolScheduler, "_due", rounded_up, WINDOW)

# Loads.

COVERS = "test_scheduler:test_a18_the_load_covers_exactly_the_blocks_between_local_and_pool_hit"


def from_the_start(right: Any, self: PoolScheduler, view: Any, tables: Any, num_tokens: int) -> None:
    hit = self._hits[view.request_id]
    self._hits[view.request_id] = replace(hit, num_computed_tokens=0)
    right(self, view, tables, hit.num_computed_tokens + num_tokens)


wrap("the local hit is loaded too", PoolScheduler, "allocated", from_the_start, COVERS)
wrap(
    "the last block of a hit is not loaded",
    PoolScheduler,
    "allocated",
    lambda right, self, view, tables, num_tokens: right(self, view, tables, num_tokens - 16),
    COVERS,
)
wrap(
    "what a load writes is not told to the fence",
    PoolScheduler,
    "build_step",
    lambda right, self, scheduled: replace(right(self, scheduled), overwritten=frozenset()),
    COVERS,
)


def again(right: Any, self: PoolScheduler, scheduled: Any) -> StepMetadata:
    step: StepMetadata = right(self, scheduled)
    self._new_loads = list(step.loads)
    return step


wrap("a load is sent at every step", PoolScheduler, "build_step", again, COVERS)
plant(
    "a failed load is tried for ever",
    PoolScheduler,
    "loads_failed",
    lambda self, request_ids: None,
    "test_scheduler:test_a_failed_load_is_not_tried_again",
)
plant(
    "blocks that the engine knows to have failed are forgotten",
    PoolScheduler,
    "blocks_failed",
    lambda self, block_ids: None,
    "test_scheduler:test_blocks_that_the_engine_knows_to_have_failed_fail_their_request",
)


def unconcerned(right: Any, self: PoolScheduler, *arguments: Any, **named: Any) -> Any:
    self._unconfirmed.clear()
    return right(self, *arguments, **named)


wrap(
    "blocks are saved on top of a load that may have failed",
    PoolScheduler,
    "_due",
    unconcerned,
    "test_scheduler:test_a28_a27_nothing_is_saved_on_top_of_a_load_that_may_have_failed",
)

# Saves.

CHUNKS = "test_scheduler:test_c19_chunked_prefill_saves_every_full_block_once"


def from_zero(right: Any, self: PoolScheduler, request: Any, *arguments: Any) -> Any:
    request.num_saved = [0] * len(request.num_saved)
    return right(self, request, *arguments)


wrap("every step saves all from the start", PoolScheduler, "_due", from_zero, CHUNKS)
plant(
    "a chunk's blocks replace those before",
    tracker.RequestTracker,
    "append_blocks",
    lambda self, block_ids: setattr(self, "block_ids", [list(table) for table in block_ids]),
    CHUNKS,
)
wrap(
    "a step that allocates no block saves nothing",
    PoolScheduler,
    "build_step",
    lambda right, self, scheduled: right(self, [one for one in scheduled if one.block_ids]),
    "test_scheduler:test_a28_a27_nothing_is_saved_on_top_of_a_load_that_may_have_failed",
)
wrap(
    "decoded tokens are saved unasked",
    PoolScheduler,
    "__init__",
    lambda right, self, *a, **k: right(self, *a, **{**k, "save_decode_cache": True}),
    "test_scheduler:test_decode_is_saved_only_when_asked_for",
)


def as_of_now(right: Any, self: Any, tracker: Any, *arguments: Any, **named: Any) -> Any:
    """Whenever it was computed, it counts for the epoch of today."""
    tracker.epoch = self._shards.epoch
    return right(self, tracker, *arguments, **named)


def unverified(right: Any, self: PoolScheduler, request: Any, *arguments: Any) -> Any:
    hashes = [*request.view.block_hashes, *[bytes(32)] * 8]
    request.view = replace(request.view, block_hashes=hashes)
    return right(self, request, *arguments)


wrap(
    "rejected tokens are saved",
    PoolScheduler,
    "_due",
    unverified,
    "test_scheduler:test_c17_rejected_tokens_are_never_saved",
)
wrap(
    "the saves of an ended request are lost",
    PoolScheduler,
    "finished",
    lambda right, self, request_id, num_tokens, completed: right(self, request_id, num_tokens, completed=False),
    "test_scheduler:test_a_request_that_ends_in_the_step_of_its_load_is_still_saved",
)
plant(
    "what did not load stays in the engine's cache",
    PoolScheduler,
    "_evict_failed",
    lambda self, failed: None,
    "test_scheduler:test_what_did_not_load_is_taken_out_of_the_engines_cache",
    how="aborted",
)
wrap(
    "the last token of an answer is taken as computed",
    PoolScheduler,
    "finished",
    lambda right, self, request_id, num_tokens, completed: right(self, request_id, num_tokens + 1, completed=completed),
    "test_scheduler:test_the_last_token_of_an_answer_is_not_taken_as_computed",
    num_tokens=64,
    complete=False,
)
wrap(
    "what was computed before a reset is saved after it",
    PoolScheduler,
    "_due",
    as_of_now,
    "test_reset:test_b10_what_was_computed_before_a_reset_is_not_saved_after_it",
)
plant(
    "ended requests are remembered for ever",
    PoolScheduler,
    "finished",
    lambda self, request_id, num_tokens, completed: False,
    "test_scheduler:test_f4_nothing_is_left_of_ended_requests",
    completed=True,
)
