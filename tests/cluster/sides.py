"""The connector's two sides behind the engine's protocols, mapped as `kvpool_connector.vllm` maps vLLM's hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool_connector.contract.shards import ShardMap
from kvpool_connector.engine import scheduled_of, tables_of, view_of
from kvpool_connector.events import BlockEvents, StoredBlock
from kvpool_connector.metadata import LoadReport, StepMetadata
from kvpool_connector.scheduler import PoolScheduler
from kvpool_connector.worker import PoolWorker
from kvpool_simulator.engine import ConnectorOutput, Order, Request, RequestStatus, SchedulerOutput
from kvpool_simulator.engine.blocks import BlockPool
from kvpool_simulator.engine.sides import Allocated

ENDED_BY_ITSELF = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(frozen=True)
class Report:
    """What a rank tells the scheduler side."""

    report: LoadReport

    def aggregate(self, other: Report) -> Report:
        return Report(self.report.merge(other.report))


class PoolSchedulerSide:
    """A `SchedulerSide`."""

    def __init__(
        self,
        scheduler: PoolScheduler,
        shards: ShardMap,
        events: BlockEvents,
        hear: Callable[[ShardMap, Sequence[StoredBlock | None]], None],
    ) -> None:
        """`hear` is a router that is told of `events`."""
        self.scheduler = scheduler
        self.shards = shards
        self.events = events
        self._hear = hear
        scheduler.set_shards(shards)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return self.scheduler.num_matched_tokens(view_of(request), num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Allocated, num_external_tokens: int) -> None:
        self.scheduler.allocated(view_of(request), tables_of(blocks), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return self.scheduler.build_step(scheduled_of(scheduler_output))

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        self.scheduler.blocks_failed(connector_output.invalid_block_ids)
        if connector_output.kv_connector_worker_meta is not None:
            self.scheduler.report(connector_output.kv_connector_worker_meta.report)
        self._hear(self.shards, self.events.take())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        completed = request.status in ENDED_BY_ITSELF
        return self.scheduler.finished(request.request_id, request.num_tokens, completed=completed), None

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind_cache(gpu_block_pool.evict_blocks)

    def reset_cache(self) -> bool:
        return self.scheduler.reset()

    def num_remembered(self) -> int:
        return self.scheduler.num_tracked

    def shutdown(self) -> None:
        self.scheduler.close()


class PoolWorkerSide:
    """A `WorkerSide`."""

    def __init__(self, worker: PoolWorker, order: Order, num_groups: int, layerwise: bool) -> None:
        self.layerwise = layerwise
        self.worker = worker
        self._order = order
        self._several = num_groups > 1
        self._step = StepMetadata()
        self._begun: StepMetadata | None = None

    def handle_preemptions(self, kv_connector_metadata: object) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._begin(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        assert isinstance(connector_metadata, StepMetadata)
        self._step = connector_metadata
        self._begin(connector_metadata)

    def _begin(self, step: StepMetadata) -> None:
        if self._begun is not step:
            self._begun = step
            self.worker.begin_step(step)

    def start_load_kv(self, forward_context: object) -> None:
        self.worker.start_loads(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object) -> None:
        self.worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self.worker.end_step(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        ended, failed = self.worker.take_loaded()
        told = self._several and self._order is Order.V0_32
        return self.worker.take_saved(), ended, failed if told else set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = self.worker.take_failed_blocks()
        return set() if self._several else failed

    def build_connector_worker_meta(self) -> Report | None:
        report = self.worker.take_report()
        return Report(report) if report else None

    def clear_connector_metadata(self) -> None:
        self._step = StepMetadata()

    def drain(self, timeout_s: float) -> bool:
        return self.worker.drain(timeout_s)

    def shutdown(self) -> None:
        self.worker.close()
