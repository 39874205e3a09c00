"""The engine's scheduler: queues, prefix hits, chunks, preemption, and what comes back from a step.

After vLLM 0.32 (`v1/core/sched/scheduler.py`), where it matters to a connector. It differs in one thing: when blocks
that a step computed on did not load, everybody who shares what was computed on them starts over behind the last right
block, and what was in flight is void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvpool_simulator.engine.blocks import Block, BlockPool
from kvpool_simulator.engine.groups import Group, Tables
from kvpool_simulator.engine.prefix import VOCABULARY, guessed
from kvpool_simulator.engine.request import Request, RequestStatus, Wish
from kvpool_simulator.engine.sides import (
    Allocated,
    CachedRequests,
    ConnectorOutput,
    NewRequest,
    Order,
    SchedulerOutput,
    SchedulerSide,
)


@dataclass(frozen=True)
class Limits:
    """Sizes of one engine."""

    num_blocks: int
    max_batched_tokens: int = 64
    max_requests: int = 16
    max_chunk: int | None = None
    """Prompt tokens of one request in one step."""
    num_draft_tokens: int = 0
    asynchronous: bool = False
    """Whether a step is planned before the one before it has ended."""
    caching: bool = True
    order: Order = Order.V0_32


@dataclass(frozen=True)
class Part:
    """What one step computes of one request."""

    request: Request
    generation: int
    start: int
    """Position of the first token that is computed now."""
    keys: tuple[int, ...]
    """Of the tokens that are computed now."""
    tables: tuple[tuple[int, ...], ...]
    """Block ids by group and index."""
    num_scheduled: int
    num_drafts: int
    num_accepted: int
    samples: bool
    weights: int = 0


@dataclass
class Step:
    """A step between plan and outcome."""

    number: int
    output: SchedulerOutput
    parts: list[Part]
    bad: dict[str, str] = field(default_factory=dict)
    """Requests that computed on wrong bytes, and what was wrong."""


class Scheduler:
    """Plans steps and takes up what came of them."""

    def __init__(
        self,
        groups: Sequence[Group],
        limits: Limits,
        connector: SchedulerSide,
        hash_block_size: int,
        accepts: Callable[[Request, int], int],
    ) -> None:
        """`accepts(request, position)`: how many of the draft tokens after `position` will be right."""
        self.limits = limits
        self.connector = connector
        self.pool = BlockPool(limits.num_blocks)
        connector.bind_gpu_block_pool(self.pool)
        self.tables = Tables(groups, self.pool, hash_block_size, limits.caching)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_steps = 0
        self.num_processed = 0
        self.ended: list[Request] = []
        """Requests that have ended, in order."""
        self.violations: list[str] = []
        self.weights = 0
        """Number of the model's weights: other weights give other KV."""
        self._largest = min(limits.max_batched_tokens, limits.max_chunk or limits.max_batched_tokens)
        self._hash_block_size = hash_block_size
        self._accepts = accepts
        self._loaded: set[str] = set()
        self._load_failed: set[str] = set()
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        # With steps in flight, a load may not be ordered after what they still write (vLLM 0.32: `defer_block_free`).
        self._defers_frees = limits.asynchronous and limits.order is Order.V0_32
        self._last_step: dict[str, int] = {}
        self._deferred: deque[tuple[int, list[Block]]] = deque()

    # From outside

    def add(self, wish: Wish) -> Request:
        """A new request."""
        request = Request(wish, self._hash_block_size)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return request

    def abort(self, request_id: str) -> None:
        """The user has gone."""
        request = self.requests.get(request_id)
        if request is None or request.status.finished:
            return
        loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and request_id not in self._loaded
        self._remove([request])
        self._loaded.discard(request_id)
        self._load_failed.discard(request_id)
        self._end(request, RequestStatus.FINISHED_ABORTED, keep_blocks=loading)

    def reset_prefix_cache(self) -> bool:
        """New weights: everybody begins anew, and what caches hold is worth nothing any more.

        As vLLM's with `reset_running_requests` and `reset_connector`. False, with the old weights, while loads or the
        ends of requests hold blocks.
        """
        if any(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in self.requests.values()):
            return False
        while self.running:
            self._preempt(self.running.pop())
        if self.pool.num_free != self.limits.num_blocks - 1:
            return False
        self.pool.forget_all()
        self.weights += 1
        self.connector.reset_cache()
        return True

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to do or to wait for."""
        return bool(self.requests or self._finished_ids)

    # A step

    def schedule(self) -> Step:
        """Plan the next step."""
        self.tables.begin_step()
        output = SchedulerOutput()
        parts: list[Part] = []
        budget = self.limits.max_batched_tokens
        new_blocks: dict[str, list[list[Block]]] = {}
        resumed: list[Request] = []
        scheduled: list[Request] = []
        budget, preempted = self._schedule_running(budget, scheduled, new_blocks, output)
        first: list[Request] = []
        if not preempted:
            self._schedule_waiting(budget, first, resumed, output)
        for request in scheduled:
            self._part(request, output, parts)
        for request in (*first, *resumed):
            self._part(request, output, parts)
        output.scheduled_new_reqs = [NewRequest(r.request_id, self._ids(r), r.num_computed_tokens) for r in first]
        cached = CachedRequests(resumed_req_ids={r.request_id for r in resumed})
        for request in (*scheduled, *resumed):
            cached.req_ids.append(request.request_id)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            if request in resumed:
                cached.new_block_ids.append(self._ids(request))
            else:
                new = new_blocks[request.request_id]
                cached.new_block_ids.append(tuple([b.block_id for b in table] for table in new) if any(new) else None)
        output.scheduled_cached_reqs = cached
        output.preempted_req_ids, self._preempted_ids = self._preempted_ids, set()
        output.finished_req_ids, self._finished_ids = self._finished_ids, set()
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        if output.num_scheduled_tokens:
            self.num_steps += 1
        for part in parts:
            self._advance(part)
        return Step(self.num_steps, output, parts)

    def _ids(self, request: Request) -> tuple[list[int], ...]:
        return tuple(self.tables.ids(request.request_id))

    def _schedule_running(
        self,
        budget: int,
        scheduled: list[Request],
        new_blocks: dict[str, list[list[Block]]],
        output: SchedulerOutput,
    ) -> tuple[int, bool]:
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_new = request.num_tokens + request.num_placeholders + len(request.draft) - request.num_computed_tokens
            # Nothing is planned beyond what the steps in flight will surely end with.
            if (
                request.num_placeholders
                and request.num_output_tokens + request.num_placeholders >= request.wish.max_tokens
            ):
                num_new = 0
            if self.limits.max_chunk:
                num_new = min(num_new, self.limits.max_chunk)
            num_new = self.tables.clip(request, request.num_computed_tokens, min(num_new, budget), self._largest)
            if num_new <= 0:
                index += 1
                continue
            while True:
                new = self.tables.allocate(request, num_new, lookahead=self.limits.num_draft_tokens)
                if new is not None:
                    break
                victim = self.running[-1]
                if not self._may_free(victim):
                    return budget, preempted
                self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    return budget, preempted
            scheduled.append(request)
            new_blocks[request.request_id] = new
            output.num_scheduled_tokens[request.request_id] = num_new
            budget -= num_new
            index += 1
        return budget, preempted

    def _schedule_waiting(
        self, budget: int, first: list[Request], resumed: list[Request], output: SchedulerOutput
    ) -> None:
        holding = [r for r in self.waiting if self.tables.of(r.request_id)[0]]
        queue = [*holding, *(r for r in self.waiting if not self.tables.of(r.request_id)[0])]
        for request in queue:
            if budget <= 0 or len(self.running) >= self.limits.max_requests:
                break
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and not self._take_up_load(request):
                continue
            if request.num_in_flight_tokens:
                continue
            external, between_steps, local, num_local = 0, False, None, 0
            if request.num_computed_tokens == 0 and not self.tables.of(request.request_id)[0]:
                local, num_local = self.tables.hit(request)
                matched, between_steps = self.connector.get_num_new_matched_tokens(request, num_local)
                if matched is None:
                    continue
                external = matched
                if external < 0 or num_local + external > request.num_tokens:
                    self.violations.append(
                        f"{request.request_id}: a hit of {external} tokens after {num_local} of {request.num_tokens}"
                    )
                    external = 0
                between_steps = between_steps and external > 0
            computed = request.num_computed_tokens + num_local + external
            num_new = 0 if between_steps else min(request.num_tokens - computed, budget)
            if self.limits.max_chunk and not between_steps:
                num_new = min(num_new, self.limits.max_chunk)
            if not between_steps and num_new <= 0:
                self.violations.append(f"{request.request_id}: nothing is left to compute after a hit of {computed}")
                external = 0
                computed = num_local
                num_new = min(request.num_tokens - computed, budget)
            if not between_steps:
                num_new = self.tables.clip(request, computed, num_new, self._largest)
                if not num_new:
                    break
            new = self.tables.allocate(
                request,
                num_new,
                local,
                num_local,
                external,
                lookahead=0 if between_steps else self.limits.num_draft_tokens,
                remember=not between_steps,
                reserved=self._reserved(request, computed // self.tables.groups[0].tokens) if between_steps else 0,
            )
            if new is None:
                break
            blocks = Allocated(tuple(self.tables.of(request.request_id)))
            self.connector.update_state_after_alloc(request, blocks, external)
            request.num_computed_tokens = computed
            if between_steps:
                request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
                continue
            self.waiting.remove(request)
            self.running.append(request)
            output.has_sync_kv_loads |= external > 0
            (resumed if request.num_preemptions else first).append(request)
            request.status = RequestStatus.RUNNING
            output.num_scheduled_tokens[request.request_id] = num_new
            budget -= num_new

    def _reserved(self, newcomer: Request, num_blocks: int) -> int:
        """Blocks that prompts under way, and the rest of the newcomer's, still need.

        A load between steps holds its blocks and cannot be preempted, so it must not take what others wait for.
        """
        under_way = [r for r in (*self.running, *self.waiting) if self.tables.of(r.request_id)[0]]
        total = -num_blocks
        for request in (*under_way, newcomer):
            table = self.tables.of(request.request_id)
            for group, blocks in zip(self.tables.groups, table, strict=True):
                total += max(0, -(-(request.num_tokens + self.limits.num_draft_tokens) // group.tokens) - len(blocks))
        return max(0, total)

    def _take_up_load(self, request: Request) -> bool:
        if request.request_id not in self._loaded:
            return False
        self._loaded.discard(request.request_id)
        if request.request_id in self._load_failed:
            self._load_failed.discard(request.request_id)
            if request.num_computed_tokens:
                self.tables.remember(request, request.num_computed_tokens)
            else:
                self.pool.give_back(self.tables.pop(request))
        else:
            self.tables.remember(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        return True

    def _part(self, request: Request, output: SchedulerOutput, parts: list[Part]) -> None:
        """What the workers compute: as the device will know it, not as it was planned before guesses were judged."""
        num_new = output.num_scheduled_tokens[request.request_id]
        start = request.num_computed_tokens - request.num_rejected_in_flight
        known = request.num_tokens + request.num_placeholders - request.num_rejected_in_flight
        planned_known = request.num_tokens + request.num_placeholders
        num_drafts = max(0, request.num_computed_tokens + num_new - planned_known)
        end = request.num_computed_tokens + num_new - request.num_rejected_in_flight
        samples = end - num_drafts >= known
        accepted = 0
        keys = [request.key_at(position) for position in range(start, end - num_drafts)]
        if num_drafts:
            last = end - num_drafts - 1
            accepted = min(self._accepts(request, last), num_drafts)
            right = [request.token_at(last + 1 + i) for i in range(accepted)]
            wrong = [(request.token_at(last + 1 + i) + 1) % VOCABULARY for i in range(accepted, num_drafts)]
            keys += guessed(request.key_at(last), right + wrong)
        parts.append(
            Part(
                request,
                request.generation,
                start,
                tuple(keys),
                tuple(tuple(table) for table in self.tables.ids(request.request_id)),
                num_new,
                num_drafts,
                accepted,
                samples,
                self.weights,
            )
        )

    def _advance(self, part: Part) -> None:
        request = part.request
        request.num_computed_tokens += part.num_scheduled
        request.num_in_flight_tokens += part.num_scheduled
        self._last_step[request.request_id] = self.num_steps
        request.draft = []
        if part.samples:
            request.num_placeholders += 1 + part.num_drafts
            request.num_rejected_in_flight += part.num_drafts - part.num_accepted
            if self.limits.asynchronous:
                request.draft = [0] * self.limits.num_draft_tokens

    def _may_free(self, request: Request) -> bool:
        return not self._defers_frees or self._last_step.get(request.request_id, 0) <= self.num_processed

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._void(request)
        self.waiting.appendleft(request)
        self._preempted_ids.add(request.request_id)

    @staticmethod
    def _void(request: Request) -> None:
        """What is in flight for the request counts no more."""
        request.generation += 1
        request.num_placeholders = 0
        request.num_rejected_in_flight = 0
        request.draft = []

    # What came of it

    def update(self, step: Step, connector_output: ConnectorOutput) -> None:
        """Take up a step's outcome, in the order of vLLM's `update_from_output`."""
        if step.output.num_scheduled_tokens:
            self.num_processed = step.number
            while self._deferred and self._deferred[0][0] <= self.num_processed:
                self.pool.give_back(self._deferred.popleft()[1])
        for request_id in connector_output.failed_recving:
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self._load_failed.add(request_id)
        failed = self._truncate(connector_output.invalid_block_ids, step)
        for part in step.parts:
            request = part.request
            request.num_in_flight_tokens -= part.num_scheduled
            if request.request_id in failed or request.status.finished or part.generation != request.generation:
                continue
            if part.samples:
                request.num_placeholders -= 1 + part.num_drafts
                rejected = part.num_drafts - part.num_accepted
                request.num_rejected_in_flight -= rejected
                request.num_computed_tokens -= rejected
            if request.request_id in step.bad:
                self.violations.append(f"{request.request_id}: wrong KV was used: {step.bad[request.request_id]}")
            if request.wish.pooling:
                if part.samples:
                    self._remove([request])
                    self._end(request, RequestStatus.FINISHED_STOPPED)
                continue
            if part.samples:
                self._take_tokens(request, part.num_accepted + 1)
        self._take_up_transfers(connector_output)

    def _take_tokens(self, request: Request, count: int) -> None:
        request.verify(min(count, request.num_wanted - request.num_output_tokens))
        if request.num_output_tokens >= request.num_wanted:
            self._remove([request])
            capped = request.num_wanted == request.wish.max_tokens
            self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED if capped else RequestStatus.FINISHED_STOPPED)
            return
        if not self.limits.asynchronous:
            request.draft = [0] * min(self.limits.num_draft_tokens, request.num_wanted - request.num_output_tokens)
        self.tables.remember(request, min(request.num_tokens, request.num_computed_tokens - request.num_placeholders))

    def _truncate(self, invalid: Iterable[int], step: Step) -> set[str]:
        """Blocks did not load: whoever counts on them, or on what was computed on them, starts over there."""
        bad = set(invalid)
        if not bad:
            return set()
        if len(self.tables.groups) > 1:
            self.violations.append(f"failed blocks {sorted(bad)} were told to an engine with several groups")
            return set()
        (group,) = self.tables.groups
        for request in self.waiting:
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                table = self.tables.ids(request.request_id)[0][: request.num_computed_tokens // group.tokens]
                hit = [i for i, block_id in enumerate(table) if block_id in bad]
                if hit:
                    request.num_computed_tokens = hit[0] * group.tokens
                    self._load_failed.add(request.request_id)
        affected: set[str] = set()
        for request in self.running:
            table = self.tables.ids(request.request_id)[0]
            hit = [i for i, block_id in enumerate(table) if block_id in bad]
            if not hit or hit[0] * group.tokens >= request.num_computed_tokens:
                continue
            bad.update(table[hit[0] :])
            affected.add(request.request_id)
            request.num_computed_tokens = hit[0] * group.tokens
            # As in vLLM with `recompute`, whoever asks for them still finds the blocks in the prefix cache.
            self._void(request)
        return affected

    def _take_up_transfers(self, connector_output: ConnectorOutput) -> None:
        self.connector.update_connector_output(connector_output)
        for request_id in sorted(connector_output.finished_recving):
            request = self.requests.get(request_id)
            if request is None:
                self.violations.append(f"{request_id} was told to be loaded and is not known")
            elif request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._loaded.add(request_id)
            elif request.status.finished:
                self._forget(request)
            else:
                self.violations.append(f"{request_id} was told to be loaded and waits for no load")
        for request_id in sorted(connector_output.finished_sending):
            request = self.requests.get(request_id)
            if request is None or not request.status.finished:
                self.violations.append(f"{request_id} was told to be sent and waits for no sending")
            else:
                self._forget(request)

    # Ends

    def _remove(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self.running:
                self.running.remove(request)
            elif request in self.waiting:
                self.waiting.remove(request)

    def _end(self, request: Request, status: RequestStatus, keep_blocks: bool = False) -> None:
        request.status = status
        self.tables.drop_skipped(request, request.num_computed_tokens - request.num_in_flight_tokens)
        keeps, _ = self.connector.request_finished_all_groups(request, self._ids(request))
        self._finished_ids.add(request.request_id)
        self.ended.append(request)
        if not keeps and not keep_blocks:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._free(request)
        del self.requests[request.request_id]
        self._last_step.pop(request.request_id, None)

    def _free(self, request: Request) -> None:
        may = self._may_free(request)
        blocks = self.tables.pop(request)
        if may:
            self.pool.give_back(blocks)
        elif blocks:
            self._deferred.append((self.num_steps, blocks))
