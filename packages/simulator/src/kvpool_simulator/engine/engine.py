"""The engine: steps in vLLM's order of calls over all ranks, one after the other or one ahead.

Every rank's hooks run in a thread of their own, so that a rank that waits keeps nobody else from going on; the device's
work is queued and lands in virtual time. What a layer takes is given, so that what a connector hides behind computing
can be measured.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvpool_simulator.device import Event
from kvpool_simulator.engine.forward import Forward
from kvpool_simulator.engine.groups import Group
from kvpool_simulator.engine.oracle import RankMemory
from kvpool_simulator.engine.request import Wish
from kvpool_simulator.engine.scheduler import Scheduler, Step
from kvpool_simulator.engine.sides import ConnectorOutput, Order, WorkerSide
from kvpool_simulator.engine.tasks import Task, Tasks

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Timing:
    """What things take, in virtual seconds."""

    layer_s: float = 0.0005
    """Computing one layer of a step, whatever its tokens."""
    token_s: float = 0.0
    """For each token and layer beside that."""
    host_s: float = 0.0001
    """Planning a step."""
    idle_s: float = 0.001
    """Until the engine looks again when it has nothing to compute; twice as long each time, up to `longest_idle_s`."""
    longest_idle_s: float = 0.05


@dataclass(frozen=True)
class Rank:
    """One worker: its memory and its side of the connector."""

    memory: RankMemory
    side: WorkerSide


class _Hooks:
    """A rank's thread, which runs hooks when told."""

    def __init__(self, tasks: Tasks, name: str, rank: Rank) -> None:
        self._tasks = tasks
        self._rank = rank
        self._job: Callable[[Rank], None] | None = None
        self._closed = False
        self.task: Task = tasks.spawn(name, self._run)

    def _run(self) -> None:
        while self._tasks.wait(lambda: self._job is not None or self._closed) and self._job is not None:
            self._job(self._rank)
            self._job = None

    def begin(self, job: Callable[[Rank], None]) -> None:
        self._job = job

    def busy(self) -> bool:
        return self._job is not None

    def close(self) -> None:
        self._closed = True


class Engine:
    """One engine with its ranks. `run` is its life; `add` and `abort` may be called from any task."""

    def __init__(
        self,
        name: str,
        tasks: Tasks,
        scheduler: Scheduler,
        groups: Sequence[Group],
        ranks: Sequence[Rank],
        timing: Timing | None = None,
        slow: Callable[[int], float] | None = None,
    ) -> None:
        """`slow(rank)`: seconds by which a rank is late with its hooks, a fault."""
        self.name = name
        self.scheduler = scheduler
        self.ranks = ranks
        self.timing = timing or Timing()
        self.num_rows_checked = 0
        self.num_steps = 0
        self.longest_hook_s: dict[str, float] = {}
        """By hook the most virtual seconds that a rank spent in it."""
        self._tasks = tasks
        self._groups = groups
        self._memories = [rank.memory for rank in ranks]
        self._layers = list(dict.fromkeys(name for memory in self._memories for name in memory.layers))
        self._without_hooks = {name for group in groups if group.state for name in group.layer_names}
        self._stream = tasks.stream()
        self._slow = slow or (lambda rank: 0.0)
        self._inbox: deque[Callable[[], object]] = deque()
        self._resets = 0
        self._closing = False
        self._sending: Counter[str] = Counter()
        self._receiving: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._hooks = [_Hooks(tasks, f"{name}-rank-{i}", rank) for i, rank in enumerate(ranks)]
        self.task: Task | None = None

    def record_event(self) -> Event:
        """After all work that the ranks' devices were given until now."""
        return self._stream.record()

    def add(self, wish: Wish) -> None:
        """A user asks."""
        self._inbox.append(lambda: self.scheduler.add(wish))

    def abort(self, request_id: str) -> None:
        """A user has gone."""
        self._inbox.append(lambda: self.scheduler.abort(request_id))

    def reset(self) -> None:
        """New weights, as soon as no step is in flight and no load; see `Scheduler.reset_prefix_cache`."""
        self._resets += 1

    def start(self) -> None:
        """Begin to run, in a task of its own."""
        self.task = self._tasks.spawn(self.name, self.run)

    def stop(self) -> None:
        """End when there is nothing left to do."""
        self._closing = True

    @property
    def ended(self) -> bool:
        """Whether `stop` has been heard and all is done."""
        return self.task is not None and self.task.done

    def run(self) -> None:
        """Steps until told to stop."""
        idle_s = self.timing.idle_s
        depth = 2 if self.scheduler.limits.asynchronous else 1
        in_flight: deque[tuple[Step, ConnectorOutput, Event]] = deque()
        while True:
            self._read_inbox()
            if self._resets and not in_flight and self.scheduler.reset_prefix_cache():
                self._resets -= 1
            if self.scheduler.has_requests and not (self._resets and in_flight):
                self._tasks.sleep(self.timing.host_s)
                step = self.scheduler.schedule()
                in_flight.append((step, *self._execute(step)))
                if step.parts:
                    idle_s = self.timing.idle_s
                elif self.scheduler.requests:
                    # vLLM spins here; that many steps would show nothing new.
                    self._tasks.sleep(idle_s)
                    idle_s = min(2 * idle_s, self.timing.longest_idle_s)
                if len(in_flight) < depth and step.parts:
                    continue
            elif not in_flight:
                if self._closing and not self._inbox:
                    break
                self._tasks.sleep(self.timing.idle_s)
                continue
            step, output, event = in_flight.popleft()
            self._tasks.wait(event.query)
            self._read_inbox()
            self.scheduler.update(step, output)
        for hooks in self._hooks:
            hooks.close()

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _execute(self, step: Step) -> tuple[ConnectorOutput, Event]:
        """All hooks of a step, around the work that the devices are given."""
        self.num_steps += 1
        output = step.output
        loads_first = self.scheduler.limits.order is Order.V0_23 or output.has_sync_kv_loads
        saves = self.scheduler.limits.order is Order.V0_32 or bool(step.parts)
        results: list[ConnectorOutput] = []

        def begin(rank: Rank) -> None:
            side = rank.side
            self._timed("handle_preemptions", side.handle_preemptions, output.kv_connector_metadata)
            self._timed("bind_connector_metadata", side.bind_connector_metadata, output.kv_connector_metadata)
            if loads_first:
                self._timed("start_load_kv", side.start_load_kv, None)

        def end(rank: Rank) -> None:
            side = rank.side
            if not loads_first:
                self._timed("start_load_kv", side.start_load_kv, None)
            if saves:
                self._timed("wait_for_save", side.wait_for_save)
            sent, loaded, failed = self._timed("get_finished", side.get_finished, output.finished_req_ids)
            invalid = side.get_block_ids_with_load_errors()
            results.append(ConnectorOutput(sent, loaded, failed, invalid, side.build_connector_worker_meta()))
            side.clear_connector_metadata()

        self._on_ranks(begin)
        if step.parts:
            self._forward(step)
        self._on_ranks(end)
        return self._merged(results), self._stream.record()

    def _forward(self, step: Step) -> None:
        forward = Forward(step, self._groups, self._memories)
        num_tokens = step.output.total_num_scheduled_tokens
        layer_s = self.timing.layer_s + self.timing.token_s * num_tokens
        if any(rank.side.layerwise for rank in self.ranks):
            for name in self._layers:
                self._on_ranks(partial(self._layer_hook, name, "wait_for_layer_load"))
                self._stream.launch(partial(forward.run, [name]), layer_s)
                self._on_ranks(partial(self._layer_hook, name, "save_kv_layer"))
        else:
            self._stream.launch(partial(forward.run, self._layers), layer_s * len(self._layers))
        self._stream.launch(partial(self._count, forward))

    def _count(self, forward: Forward) -> None:
        self.num_rows_checked += forward.num_rows_checked

    def _layer_hook(self, name: str, hook: str, rank: Rank) -> None:
        # As in vLLM (0.32), where attention calls hooks and layers with states do not.
        if name in rank.memory.layers and name not in self._without_hooks:
            arguments = (name,) if hook == "wait_for_layer_load" else (name, rank.memory.caches.kv_caches[name], None)
            self._timed(hook, getattr(rank.side, hook), *arguments)

    def _on_ranks(self, job: Callable[[Rank], None]) -> None:
        """Run hooks on all ranks at once; return when all are through."""

        def late(seconds: float, rank: Rank) -> None:
            self._tasks.sleep(seconds)
            job(rank)

        for index, hooks in enumerate(self._hooks):
            seconds = self._slow(index)
            hooks.begin(partial(late, seconds) if seconds else job)
        self._tasks.wait(lambda: not any(hooks.busy() for hooks in self._hooks))

    def _timed(self, name: str, hook: Callable[..., Answer], *arguments: object) -> Answer:
        start = self._tasks.clock.now()
        result = hook(*arguments)
        took = self._tasks.clock.now() - start
        self.longest_hook_s[name] = max(self.longest_hook_s.get(name, 0.0), took)
        return result

    def _merged(self, results: Sequence[ConnectorOutput]) -> ConnectorOutput:
        """All ranks' answers as one: done is what all have done, failed what failed anywhere."""
        merged = ConnectorOutput()
        for result in results:
            self._sending.update(result.finished_sending)
            self._receiving.update(result.finished_recving)
            self._failed |= result.failed_recving
            merged.invalid_block_ids |= result.invalid_block_ids
            meta = result.kv_connector_worker_meta
            if meta is not None:
                mine = merged.kv_connector_worker_meta
                merged.kv_connector_worker_meta = meta if mine is None else mine.aggregate(meta)
        for counts, done in ((self._sending, merged.finished_sending), (self._receiving, merged.finished_recving)):
            for request_id in [request_id for request_id, count in counts.items() if count == len(self.ranks)]:
                del counts[request_id]
                done.add(request_id)
        merged.failed_recving = self._failed & merged.finished_recving
        self._failed -= merged.failed_recving
        return merged
