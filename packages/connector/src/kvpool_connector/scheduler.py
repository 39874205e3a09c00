"""The scheduler side: what is in the pool, what to load, what to save. No vLLM, no Mooncake in here.

It alone decides; workers carry out. A hit is what every shard of every group holds; a load that failed anywhere failed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvpool_connector.contract.clock import Clock, MonotonicClock
from kvpool_connector.contract.errors import ConfigError
from kvpool_connector.contract.shards import ShardMap
from kvpool_connector.contract.status import Status, num_outages
from kvpool_connector.counters import Counters
from kvpool_connector.epoch import marker, newest_epoch
from kvpool_connector.events import BlockEvents, StoredBlock
from kvpool_connector.history import Decision, History
from kvpool_connector.lookup import Lookup
from kvpool_connector.metadata import GroupBlocks, LoadJob, LoadReport, SaveJob, StepMetadata
from kvpool_connector.recent_saves import RecentSaves, Scope
from kvpool_connector.threshold import FixedThreshold, LearntThreshold, StepTimes
from kvpool_connector.tracing import Timer, Trace
from kvpool_connector.tracker import GroupRule, RequestTracker, RequestView

logger = logging.getLogger(__name__)

HIT_MEMORY_S = 1.0
"""How long a lookup's result serves a request that waits for room; well below a lease, which the lookup granted."""

MAX_MOVES = 3
"""How often one lookup follows a reset that comes while it asks."""

Tables = Sequence[Sequence[int | None]]
"""Block ids by group and block index; None where the engine holds no block."""


class ScheduledRequest(NamedTuple):
    """A request's part of one step, as the engine's scheduler output tells it.

    A tuple: there is one for every running request in every step.
    """

    request_id: str
    block_ids: Tables | None
    """New blocks by group; all blocks when `replaces`; None when the step allocated none."""
    replaces: bool
    num_computed_tokens: int
    num_scheduled_tokens: int


@dataclass(frozen=True)
class _Hit:
    num_computed_tokens: int
    num_tokens: int
    boundary: int
    expires: float
    epoch: int


@dataclass(frozen=True)
class _Unconfirmed:
    """Blocks of a load that computing waits for, whose outcome is not known yet."""

    block_ids: frozenset[int]
    step: int
    left: list[Sequence[int | None]] = field(default_factory=list)
    """Block tables with some of these blocks, of requests that have ended or begun anew since."""


class PoolScheduler:
    """Lookups, load jobs and save jobs of one engine."""

    def __init__(
        self,
        rules: Sequence[GroupRule],
        hash_block_size: int,
        lookup: Lookup,
        *,
        loads: bool = True,
        saves: bool = True,
        load_between_steps: bool = False,
        save_decode_cache: bool = False,
        confirm_after_steps: int | None = None,
        min_tokens_to_load: int | Literal["auto"] = 0,
        clock: Clock | None = None,
        trace: Trace | None = None,
        history: History | None = None,
        events: BlockEvents | None = None,
    ) -> None:
        """`hash_block_size`: tokens a hash of `RequestView.block_hashes`; divides every group's block size, or
        `ConfigError` is raised.

        `confirm_after_steps`: for engines that carry no `LoadReport`, the steps after which a load that computing
        waited for has surely been heard of if it failed. `events` is told of saves and resets. `min_tokens_to_load`:
        see `kvpool_connector.threshold`.
        """
        for index, rule in enumerate(rules):
            if rule.block_size % hash_block_size:
                raise ConfigError(
                    f"KV cache group {index}: its blocks do not divide into hashed ones: found blocks of "
                    f"{rule.block_size} tokens (of all context-parallel ranks), and a block hash for each "
                    f"{hash_block_size}; expected a multiple. Start with a --block-size that divides the blocks of "
                    "every group, or serve this model without the pool"
                )
        self._rules = rules
        self._hash_block_size = hash_block_size
        self._lookup = lookup
        self._loads = loads
        self._saves = saves
        # The engine can recompute after a failed load in mid-step only when there is one group.
        self._between_steps = load_between_steps or len(rules) > 1
        self._save_decode_cache = save_decode_cache
        self._clock = clock or MonotonicClock()
        self._trace = trace
        self._history = history
        self._events = events
        self._alignment = math.lcm(*(rule.block_size for rule in rules))
        self._learnt = LearntThreshold(self._alignment) if min_tokens_to_load == "auto" else None
        self._threshold = self._learnt or (FixedThreshold(int(min_tokens_to_load)) if min_tokens_to_load else None)
        self._load_tokens: dict[str, int] = {}
        self._steps = StepTimes(self._clock)
        self._shards: ShardMap | None = None
        self._hits: dict[str, _Hit] = {}
        self._trackers: dict[str, RequestTracker] = {}
        self._new_loads: list[LoadJob] = []
        self._recent = RecentSaves(self._clock)
        self._final_saves: list[SaveJob] = []
        self._unconfirmed: dict[str, _Unconfirmed] = {}
        self._confirm_after_steps = confirm_after_steps
        self._num_steps = 0
        self._epoch_expires = 0.0
        self._evict: Callable[[set[int]], None] = lambda block_ids: None
        self.counters = Counters()

    def bind_cache(self, evict: Callable[[set[int]], None]) -> None:
        """`evict` takes blocks out of the engine's own prefix cache."""
        self._evict = evict

    def set_shards(self, shards: ShardMap) -> None:
        """What the ranks hold; before it is known every lookup is a miss and nothing is saved."""
        if self._shards is not None and self._shards.epoch > shards.epoch:
            shards.move(self._shards.epoch)
        self._shards = shards

    @property
    def epoch(self) -> int | None:
        """Of what is looked up and saved now; None before the shards are known."""
        return self._shards.epoch if self._shards else None

    @property
    def ready(self) -> bool:
        """True once the ranks' shards are known."""
        return self._shards is not None

    def num_matched_tokens(self, view: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the pool has beyond the engine's own `num_computed_tokens`, and whether they load between steps.

        May be called again and again for a request: the answer is remembered for a moment. At least one token is left
        to compute.
        """
        tracker = self._trackers.get(view.request_id)
        if self._shards and not self._loads:
            self._follow_resets()
        if tracker and self._shards:
            # Asked for only by requests that begin from nothing.
            tracker.epoch = self._shards.epoch
        if not (self._loads and self._shards and view.poolable) or (tracker and tracker.load_failed):
            return 0, False
        hit = self._hits.get(view.request_id)
        now = self._clock.now()
        if (
            hit is None
            or (hit.num_computed_tokens, hit.num_tokens) != (num_computed_tokens, view.num_tokens)
            or hit.expires <= now
            or hit.epoch != self._shards.epoch
        ):
            boundary = self._boundary(view, num_computed_tokens)
            hit = _Hit(num_computed_tokens, view.num_tokens, boundary, now + HIT_MEMORY_S, self._shards.epoch)
            self._hits[view.request_id] = hit
            if tracker:
                tracker.epoch = hit.epoch
        num_tokens = hit.boundary - num_computed_tokens
        return num_tokens, self._between_steps and num_tokens > 0

    def _boundary(self, view: RequestView, local: int) -> int:
        """The furthest boundary up to which the pool continues the `local` tokens, by every group's rule."""
        assert self._shards is not None
        hashed = len(view.block_hashes) * self._hash_block_size
        limit = min(view.num_tokens - 1, hashed) // self._alignment * self._alignment
        # An engine that hits a part of a block (vLLM with states) copies it when the step runs: a load would be lost.
        if limit <= local or local % self._alignment:
            self.counters.add("lookups_short")
            self._remember(view, "short", local, limit, local)
            return local
        if self._threshold and not self._threshold.worth(limit - local):
            self._follow_resets()
            self.counters.add("lookups_below")
            self._remember(view, "below", local, limit, local)
            return local
        spans = [
            (local // rule.block_size, limit // rule.block_size, len(self._shards.shards(group)))
            for group, rule in enumerate(self._rules)
        ]
        timer = self._trace and Timer(self._trace, "kvpool.lookup", view.request_id, view.trace_headers)
        asked = self._clock.now()
        statuses = self._ask(view, spans)
        if self._learnt:
            self._learnt.looked_up(self._clock.now() - asked)
        self.counters.add("lookup_keys", len(statuses))
        present: list[list[bool]] = []
        at = 0
        for start, end, num_shards in spans:
            past = at + (end - start) * num_shards
            present.append(_whole(statuses[at:past], num_shards))
            at = past
        boundary = limit
        obstacle: tuple[int, int] | None = None
        while boundary > local and (found := self._obstacle(boundary, local, present)):
            obstacle = group, index = found
            # A nearer boundary needs no block less of those in front of it, so none behind this block will do.
            boundary = index * self._rules[group].block_size // self._alignment * self._alignment
        self.counters.add("lookup_hit_tokens", max(0, boundary - local))
        result = "hit" if boundary > local else "unanswered" if num_outages(statuses) else "miss"
        if self._threshold and local < boundary < limit and not self._threshold.worth(boundary - local):
            result = "below"
        self.counters.add(f"lookups_{result}")
        if timer:
            num_found = max(0, boundary - local)
            timer.end(result=result, keys=len(statuses), tokens=limit - local, hit_tokens=num_found)
        self._remember(view, result, local, limit, max(boundary, local), obstacle, statuses, spans)
        return boundary if result == "hit" else local

    def _remember(
        self,
        view: RequestView,
        result: str,
        local: int,
        limit: int,
        hit: int,
        obstacle: tuple[int, int] | None = None,
        statuses: Sequence[Status] = (),
        spans: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """For those who ask later. `obstacle`: group and index of the first block that was needed and not there."""
        if self._history is None:
            return
        decision = Decision(view.request_id, time.time(), result, view.num_tokens, local, limit, hit)
        decision.least_tokens = self._threshold.tokens if self._threshold else 0
        if obstacle is not None and self._shards is not None:
            decision.group, decision.block = group, index = obstacle
            at = sum((end - start) * num_shards for start, end, num_shards in spans[:group])
            at += (index - spans[group][0]) * spans[group][2]
            keys = self._shards.keys(group, [self._hash(view, self._rules[group], index)], view.tag)
            missing = (key for key, status in zip(keys, statuses[at:], strict=False) if status is not Status.OK)
            decision.missing_keys, decision.block_keys = tuple(missing), len(keys)
        self._history.looked_up(decision)

    def _ask(self, view: RequestView, spans: Sequence[tuple[int, int, int]]) -> list[Status]:
        """Statuses of all objects of the blocks `start .. end` of each group, in the newest epoch that has begun."""
        assert self._shards is not None
        for _ in range(MAX_MOVES):
            keys: list[str] = []
            for group, (rule, (start, end, _)) in enumerate(zip(self._rules, spans, strict=True)):
                keys += self._shards.keys(group, self._hashes(view, rule, start, end), view.tag)
            epoch = self._shards.epoch
            this, following = (marker(self._shards.namespace, epoch + i) for i in (0, 1))
            # In one call with the blocks: an answer about blocks is never older than that about the epoch.
            begun, ended, *statuses = self._lookup.exist([this, following, *keys])
            if begun is Status.MISS and epoch:
                # Its owner is gone, or the reset could not tell the store. Those who start later must know.
                self._lookup.mark(this)
            if ended is not Status.OK:
                return statuses if ended is Status.MISS else [ended] * len(keys)
            self._move(newest_epoch(self._lookup.exist, self._shards.namespace, epoch + 1))
        # Resets come faster than they are followed, or the store says yes to everything: no answer to rely on.
        return [Status.UNAVAILABLE] * len(keys)

    def _follow_resets(self) -> None:
        """Where nothing is looked up: ask at times whether others have reset the pool."""
        assert self._shards is not None
        now = self._clock.now()
        if now >= self._epoch_expires:
            self._epoch_expires = now + HIT_MEMORY_S
            self._move(newest_epoch(self._lookup.exist, self._shards.namespace, self._shards.epoch))

    def _move(self, epoch: int) -> None:
        """Go on in an epoch that has begun, which may be this one."""
        assert self._shards is not None
        if epoch != self._shards.epoch:
            self._shards.move(epoch)
            if self._events:
                self._events.cleared()

    def reset(self) -> bool:
        """Make all that this namespace has in the pool unreachable, for every engine, whatever its leases.

        False when the store did not confirm it: then this engine reads nothing from before, while others may, until
        the store can be told; this engine's lookups tell it.
        """
        if self._shards is None:
            logger.error("event=reset_failed: the workers have not announced what they hold; call again later")
            return False
        namespace = self._shards.namespace
        epoch = newest_epoch(self._lookup.exist, namespace, self._shards.epoch) + 1
        key = marker(namespace, epoch)
        # The store may say that it has stored what it has not.
        confirmed = self._lookup.mark(key).stored and self._lookup.exist([key])[0].ok
        self._move(epoch)
        self._hits.clear()
        if not confirmed:
            logger.error(
                "event=reset_failed namespace=%s epoch=%d: the store did not confirm it. This engine reads nothing "
                "from before, other engines may; call again when the store is up",
                namespace,
                epoch,
            )
        return confirmed

    def _obstacle(self, boundary: int, local: int, present: Sequence[list[bool]]) -> tuple[int, int] | None:
        """Group and index of the first block that computing on from `boundary` needs and the pool has not.

        `present[group][i]`: whether block `local // block_size + i` of the group is in the pool.
        """
        for group, (rule, blocks) in enumerate(zip(self._rules, present, strict=True)):
            first = local // rule.block_size
            needed = blocks[max(0, rule.first_needed(boundary) - first) : boundary // rule.block_size - first]
            if False in needed:
                return group, boundary // rule.block_size - len(needed) + needed.index(False)
        return None

    def _hashes(self, view: RequestView, rule: GroupRule, start: int, end: int) -> Sequence[bytes]:
        """The hashes of the blocks `start .. end` of a group, each for all tokens before the block's end."""
        step = rule.block_size // self._hash_block_size
        return view.block_hashes[(start + 1) * step - 1 : end * step : step]

    def _hash(self, view: RequestView, rule: GroupRule, index: int) -> bytes:
        return self._hashes(view, rule, index, index + 1)[0]

    def allocated(self, view: RequestView, tables: Tables, num_external_tokens: int) -> None:
        """The engine took up a hit of `num_external_tokens` and holds blocks for it.

        With 0 nothing is loaded, and nobody looks at `tables`.
        """
        hit = self._hits.pop(view.request_id, None)
        tracker = self._tracker(view)
        if hit is not None:
            loaded = max(0, num_external_tokens)
            self.counters.add("tokens_engine", hit.num_computed_tokens)
            self.counters.add("tokens_pool", loaded)
            self.counters.add("tokens_computed", max(0, view.num_tokens - hit.num_computed_tokens - loaded))
            tracker.num_loading = loaded
        if num_external_tokens <= 0 or hit is None:
            return
        if self._history is not None:
            self._history.loading(view.request_id, num_external_tokens)
        start, end = hit.num_computed_tokens, hit.num_computed_tokens + num_external_tokens
        if self._learnt:
            self._load_tokens[view.request_id] = num_external_tokens
        blocks: list[GroupBlocks] = []
        for group, (rule, table) in enumerate(zip(self._rules, tables, strict=True)):
            indices = range(start // rule.block_size, end // rule.block_size)
            blocks.append(self._held(view, group, indices, table)[0])
        self._new_loads.append(
            LoadJob(view.request_id, tuple(blocks), view.tag, self._between_steps, hit.epoch, view.trace_headers)
        )

    def _held(
        self, view: RequestView, group: int, indices: range, table: Sequence[int | None]
    ) -> tuple[GroupBlocks, Sequence[int]]:
        """The blocks among `indices` that the engine holds, and their indices."""
        ids = table[indices.start : indices.stop]
        hashes = self._hashes(view, self._rules[group], indices.start, indices.stop)
        if None not in ids:
            return GroupBlocks(group, tuple(ids), tuple(hashes)), indices  # type: ignore[arg-type]
        held = [
            (block_id, block_hash) for block_id, block_hash in zip(ids, hashes, strict=True) if block_id is not None
        ]
        block_ids, block_hashes = tuple(one for one, _ in held), tuple(one for _, one in held)
        kept = [i for i, block_id in zip(indices, ids, strict=True) if block_id is not None]
        return GroupBlocks(group, block_ids, block_hashes), kept

    def _tracker(self, view: RequestView) -> RequestTracker:
        tracker = self._trackers.get(view.request_id)
        if tracker is None:
            epoch = self._shards.epoch if self._shards else 0
            tracker = RequestTracker(view, [[] for _ in self._rules], num_saved=[0] * len(self._rules), epoch=epoch)
            self._trackers[view.request_id] = tracker
        tracker.view, tracker.due_at = view, 0
        return tracker

    def build_step(self, scheduled: Iterable[ScheduledRequest]) -> StepMetadata:
        """This step's work for the workers. Requests that were never `allocated` are somebody else's."""
        self._num_steps += 1
        if self._confirm_after_steps is not None:
            oldest = self._num_steps - self._confirm_after_steps
            self._unconfirmed = {r: load for r, load in self._unconfirmed.items() if load.step > oldest}
        loads, self._new_loads = self._new_loads, []
        overwritten: set[int] = set()
        for job in loads:
            ids = frozenset(block_id for group in job.blocks for block_id in group.block_ids)
            overwritten |= ids
            if not job.between_steps:
                self._unconfirmed[job.request_id] = _Unconfirmed(ids, self._num_steps)
        saves, self._final_saves = self._final_saves, []
        num_tokens = 0
        for request in scheduled:
            num_tokens += request.num_scheduled_tokens
            tracker = self._trackers.get(request.request_id)
            if tracker is None:
                continue
            if request.block_ids is not None:
                overwritten |= self._take_blocks(tracker, request.block_ids, request)
            tracker.num_computed_tokens = request.num_computed_tokens + request.num_scheduled_tokens
            if tracker.num_computed_tokens >= tracker.due_at and self._saves and tracker.view.poolable and self._shards:
                saves += self._due(tracker, request.num_computed_tokens)
        number = 0
        if self._learnt:
            number = self._num_steps
            waits = any(not job.between_steps for job in loads)
            self._steps.began(number, num_tokens, usual=bool(num_tokens) and not waits)
        return StepMetadata(tuple(loads), tuple(saves), frozenset(overwritten), number)

    def _take_blocks(self, tracker: RequestTracker, tables: Tables, request: ScheduledRequest) -> set[int]:
        """Bring the tracker's block tables up to date; the blocks that the step may write."""
        if not request.replaces:
            tracker.append_blocks(tables)
            return {block_id for table in tables for block_id in table if block_id is not None}
        self._leave(tracker)
        tracker.replace_blocks(tables)
        self._pass_over(tracker, request.num_computed_tokens)
        return {
            block_id
            for rule, table in zip(self._rules, tables, strict=True)
            for block_id in table[request.num_computed_tokens // rule.block_size :]
            if block_id is not None
        }

    def _pass_over(self, tracker: RequestTracker, num_computed_tokens: int) -> None:
        """Blocks that the engine has itself, and that went to a save a moment ago, are not handed over again.

        The last block stands for those before it: they went to a save with it, or before it and were passed over then.
        """
        view = tracker.view
        for group, rule in enumerate(self._rules):
            end = num_computed_tokens // rule.block_size
            num_hashed = len(view.block_hashes) * self._hash_block_size // rule.block_size
            if not 0 < end <= num_hashed:
                continue
            scope = Scope(tracker.epoch, group, view.tag)
            # With a prompt of whole blocks the last one is computed again.
            for index in range(end - 1, num_hashed):
                if not self._recent.knows(scope, self._hash(view, rule, index)):
                    break
                tracker.num_saved[group] = index + 1

    def _due(self, tracker: RequestTracker, start: int, final: bool = False) -> list[SaveJob]:
        """The save job of blocks that are complete at the end of a step that computes from token `start`.

        Blocks that lie on a load whose outcome is not known yet wait for it: what was computed on a block that did not
        load must never be stored.
        """
        assert self._shards is not None
        if tracker.epoch != self._shards.epoch:
            # Under the new epoch it would be wrong, and under its own nobody reads it any more.
            return []
        loads = self._unconfirmed.values()
        if any(not load.block_ids.isdisjoint(table) for load in loads for table in tracker.block_ids):
            return []
        view = tracker.view
        limit = min(tracker.num_computed_tokens, len(view.block_hashes) * self._hash_block_size)
        if not self._save_decode_cache:
            limit = min(limit, view.num_prompt_tokens)
        blocks: list[GroupBlocks] = []
        for group, (rule, table) in enumerate(zip(self._rules, tracker.block_ids, strict=True)):
            first = max(tracker.num_saved[group], rule.first_certain(start, tracker.num_computed_tokens))
            last = min(limit, view.num_prompt_tokens) if rule.prompts_only else limit
            end = min(last // rule.block_size, len(table))
            tracker.num_saved[group] = max(tracker.num_saved[group], end)
            held, indices = self._held(view, group, range(first, end), table)
            if indices:
                blocks.append(held)
                self._recent.note(Scope(tracker.epoch, group, view.tag), held.block_hashes)
                if self._events:
                    self._expect(self._events, view, group, indices)
        due_at = min((n + 1) * rule.block_size for n, rule in zip(tracker.num_saved, self._rules, strict=True))
        tracker.due_at = due_at if self._save_decode_cache or due_at <= view.num_prompt_tokens else math.inf
        headers = view.trace_headers
        return [SaveJob(view.request_id, tuple(blocks), view.tag, final, tracker.epoch, headers)] if blocks else []

    def _expect(self, events: BlockEvents, view: RequestView, group: int, indices: Sequence[int]) -> None:
        assert self._shards is not None
        rule = self._rules[group]
        for index in indices:
            start = index * rule.block_size
            block = StoredBlock(
                group,
                block_hash=self._hash(view, rule, index),
                parent=self._hash(view, rule, index - 1) if index else None,
                token_ids=tuple(view.token_ids[start : start + rule.block_size]),
                block_size=rule.block_size,
                lora_name=view.lora_name,
            )
            events.expect(self._shards.keys(group, [block.block_hash], view.tag), block)

    def finished(self, request_id: str, num_tokens: int, *, completed: bool) -> bool:
        """The request has ended; True when its blocks must be kept until a worker says that it is saved.

        `num_tokens`: of prompt and answer. The last one has only been sampled: what lies in its place, if anything, may
        be the KV of a guess that was rejected. `completed`: it ended by itself, so that all before is right; False for
        an abort.
        """
        self._hits.pop(request_id, None)
        self._load_tokens.pop(request_id, None)
        tracker = self._trackers.pop(request_id, None)
        if tracker is not None:
            self._leave(tracker)
        loaded = self._unconfirmed.pop(request_id, None)
        if tracker is None or not completed or not (self._saves and tracker.view.poolable and self._shards):
            if loaded is not None and not completed:
                # Others may share blocks of a load whose outcome is still open.
                self._unconfirmed[request_id] = loaded
            return False
        tracker.num_computed_tokens = min(tracker.num_computed_tokens, num_tokens - 1)
        if tracker.num_computed_tokens < tracker.due_at:
            return False
        jobs = self._due(tracker, tracker.num_computed_tokens, final=True)
        self._final_saves += jobs
        return bool(jobs)

    def report(self, report: LoadReport) -> None:
        """What the workers, together, say of loads and saves that have ended, and of the step."""
        if self._events:
            self._events.saved(report.stored, report.present)
        if self._learnt:
            self._learn(self._learnt, report)
        ended = {r: self._unconfirmed.pop(r) for r in report.loaded | report.failed if r in self._unconfirmed}
        self._evict_failed([ended[request_id] for request_id in report.failed if request_id in ended])
        self.loads_failed(report.failed)

    def _learn(self, learnt: LearntThreshold, report: LoadReport) -> None:
        if report.step:
            for num_tokens, seconds in self._steps.ended(report.step):
                learnt.stepped(num_tokens, seconds)
        for request_id in report.loaded | report.failed:
            tokens = self._load_tokens.pop(request_id, 0)
            if tokens and request_id in report.seconds:
                learnt.loaded(tokens, report.seconds[request_id])

    def _leave(self, tracker: RequestTracker) -> None:
        """A request lets go of its blocks; the engine's cache keeps them, whatever becomes of a load under way."""
        for load in self._unconfirmed.values():
            load.left.extend(table for table in tracker.block_ids if not load.block_ids.isdisjoint(table))

    def _evict_failed(self, failed: Sequence[_Unconfirmed]) -> None:
        """Take blocks that did not load, and all that was computed on them, out of the engine's prefix cache.

        The engine itself (vLLM 0.32) starts over only requests that run: after a preemption or an abort with the load's
        step in flight it would hand such blocks to the next request with that prompt.
        """
        if not failed:
            return
        bad = frozenset[int]().union(*(load.block_ids for load in failed))
        tables = [table for load in failed for table in load.left]
        tables += [table for tracker in self._trackers.values() for table in tracker.block_ids]
        doubtful: set[int] = set()
        for table in tables:
            first = next((i for i, block_id in enumerate(table) if block_id in bad), len(table))
            doubtful.update(block_id for block_id in table[first:] if block_id is not None)
        self._evict(doubtful)

    def blocks_failed(self, block_ids: set[int]) -> None:
        """The engine was told that these blocks did not load."""
        self.report(
            LoadReport(
                failed=frozenset(
                    request_id
                    for request_id, load in self._unconfirmed.items()
                    if not load.block_ids.isdisjoint(block_ids)
                )
            )
        )

    def loads_failed(self, request_ids: Iterable[str]) -> None:
        """These requests' loads failed: they are computed, not asked for again."""
        for request_id in request_ids:
            if tracker := self._trackers.get(request_id):
                tracker.load_failed = True
                if self._history is not None:
                    self._history.load_failed(request_id)
                self.counters.add("tokens_failed", tracker.num_loading)
                tracker.num_loading = 0
                tracker.begin_saving_anew()

    @property
    def num_tracked(self) -> int:
        """Requests of which anything is remembered; 0 when none is under way."""
        return len(self._trackers.keys() | self._hits.keys() | self._unconfirmed.keys())

    def close(self) -> None:
        """Leave the store."""
        self._lookup.close()


def _whole(statuses: Sequence[Status], num_shards: int) -> list[bool]:
    """For each block whether all its `num_shards` objects are there."""
    if statuses.count(Status.OK) == len(statuses):
        return [True] * (len(statuses) // num_shards)
    whole = [Status.OK] * num_shards
    return [statuses[i : i + num_shards] == whole for i in range(0, len(statuses), num_shards)]
