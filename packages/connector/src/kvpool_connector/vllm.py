"""vLLM's connector interface over the two sides. The only file that imports vLLM.

Versions are told apart by what is there. Checked against vLLM 0.14.1, 0.23.0 and 0.32.0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.contract.clock import MonotonicClock
from kvpool_connector.contract.device import Device
from kvpool_connector.contract.errors import ConfigError, TopologyError
from kvpool_connector.contract.shards import RankShards, ShardMap, with_prefill_ranks
from kvpool_connector.contract.topology import Rank
from kvpool_connector.engine import (
    cuts_of,
    groups_of,
    hash_block_size_of,
    hashing_of,
    model_of,
    orders_of,
    rule_of,
    scheduled_of,
    tables_of,
    topology_of,
    view_of,
)
from kvpool_connector.events import BlockEvents, StoredBlock
from kvpool_connector.history import History, serve_history
from kvpool_connector.host import HostDevice
from kvpool_connector.local_socket import LocalServer
from kvpool_connector.lookup import Lookup, StoreLookup
from kvpool_connector.lookup_socket import SocketLookup, socket_path
from kvpool_connector.metadata import LoadReport, StepMetadata
from kvpool_connector.mooncake import MooncakeStore, SharedEngine
from kvpool_connector.outage import Outage
from kvpool_connector.scheduler import PoolScheduler
from kvpool_connector.stats import FAMILIES, labelled
from kvpool_connector.tracing import Span, Trace
from kvpool_connector.worker import PoolWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvpool")

ENDED_BY_ITSELF = frozenset(
    status
    for name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
    if (status := getattr(RequestStatus, name, None)) is not None
)

# Absent before 0.32: without PYTHONHASHSEED every process then starts its block hashes from random bytes.
DEFAULT_SEED = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
# Absent before 0.23: the outcome of loads is then known by the failed blocks alone, after the steps in flight.
REPORTS_LOADS = hasattr(vllm_base, "KVConnectorWorkerMetadata")
_WorkerMetadataBase: Any = getattr(vllm_base, "KVConnectorWorkerMetadata", object)
# Absent before 0.23: blocks of a failed load cannot be taken out of the engine's prefix cache, so loads that a step
# computes on are not safe, and all go between steps.
EVICTS_BLOCKS = hasattr(KVConnectorBase_V1, "bind_gpu_block_pool")
# Absent before 0.32: with several KV cache groups the engine then crashes on a failed load, so nothing is loaded.
REPORTS_FAILED_REQUESTS = hasattr(vllm_base, "KVConnectorTransferResults")
# Of blocks in the pool, in KV events; vLLM's own name since 0.32.
MEDIUM = "STORAGE"
_TransferResults: Any = getattr(vllm_base, "KVConnectorTransferResults", None)


@dataclass
class PoolMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step's work, as vLLM carries it to the workers."""

    step: StepMetadata


@dataclass
class PoolHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a worker announces, as vLLM carries it to the scheduler."""

    shards: RankShards


@dataclass
class PoolWorkerMetadata(_WorkerMetadataBase):  # type: ignore[misc]
    """What workers report after a step, as vLLM merges it and carries it to the scheduler."""

    report: LoadReport
    announced: tuple[RankShards, ...] = ()
    """What the workers hold, with their first report: a parent connector may have kept it back from the handshake."""

    def aggregate(self, other: PoolWorkerMetadata) -> PoolWorkerMetadata:
        """Both workers' reports as one."""
        return PoolWorkerMetadata(self.report.merge(other.report), self.announced + other.announced)


@dataclass
class PoolStats(KVConnectorStats):  # type: ignore[misc]
    """Counts of an interval by name."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Sums by name."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts themselves."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True when nothing was counted."""
        return not self.data


class PoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts as Prometheus counters: one a family, with the engine's labels and one of a fixed set of results."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counts = {
            family.name: self._counter_cls(
                name=f"vllm:{family.name}", documentation=family.meaning, labelnames=[*labelnames, "result"]
            )
            for family in FAMILIES
        }
        # From the start with 0: of a count that appears with 1 a monitoring system sees no growth.
        for values in per_engine_labelvalues.values():
            for family in FAMILIES:
                for result in family.counts.values():
                    self._counts[family.name].labels(*values, result)

    def observe(self, transfer_stats_data: Any, engine_idx: int = 0) -> None:
        """Add an interval's counts: by name, or as `PoolStats` where both ends are in one process."""
        labels = self.per_engine_labelvalues[engine_idx]
        for family, result, count in labelled(getattr(transfer_stats_data, "data", transfer_stats_data)):
            self._counts[family.name].labels(*labels, result).inc(count)


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The pool as a vLLM connector, with `kv_connector_module_path` set to `kvpool_connector.vllm`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None
    ) -> None:
        """Raises `ConfigError`, `TopologyError` or `StoreSetupError` with what to change."""
        super().__init__(vllm_config, role, kv_cache_config)
        if kv_cache_config is None:
            raise ConfigError(
                "this vLLM hands its connectors no KV cache configuration; vLLM 0.14.1 or newer is needed"
            )
        self._cache_config = kv_cache_config
        self._settings = PoolSettings.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        # Of every layer in every step it is asked.
        self._by_layers = bool(self._settings.use_layerwise)
        self._topology = replace(topology_of(vllm_config), cuts=cuts_of(vllm_config, self._settings))
        self._worker: PoolWorker | None = None
        self._scheduler: PoolScheduler | None = None
        self._events: BlockEvents | None = None
        self._history_server: LocalServer | None = None
        self._announced: RankShards | None = None
        self._unreported: tuple[RankShards, ...] = ()
        self._begun: StepMetadata | None = None
        self._told_pool_off = False
        self._num_steps = 0
        # The first step's report may bring the announcements too; others may be scheduled before it arrives.
        self._announced_after = 2 + self._topology.pp_size if REPORTS_LOADS else 0
        store = StoreSettings.from_environment(os.environ)
        if role is KVConnectorRole.WORKER:
            self._worker = self._make_worker(store)
        else:
            self._scheduler = self._make_scheduler(store)

    def _make_worker(self, store_settings: StoreSettings) -> PoolWorker:
        device = this_device()
        engine = shared_engine(store_settings)
        store = MooncakeStore(store_settings, self._settings, bind_thread=device.bind_thread, engine=engine)
        store.connect()
        tell_joined(store, store_settings)
        model = model_of(self._vllm_config, self._settings)
        rank = this_rank()
        trace = trace_of(self._vllm_config)
        settings = self._settings.beside(store_settings)
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        hash_function = get_hash_fn_by_name(algorithm)
        hashing = hashing_of(algorithm, hash_function, kv_cache_utils.hash_block_tokens, DEFAULT_SEED, os.environ)
        worker = PoolWorker(
            settings,
            store,
            device,
            self._topology,
            rank,
            model,
            trace=trace,
            hashing=hashing,
            reports_stored=publishes_events(self._vllm_config),
        )
        if store_settings.protocol == "ascend" and rank == Rank():
            worker.serve_lookups(self._lookup_path())
        return worker

    def _lookup_path(self) -> Path:
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        return socket_path(
            engine_id, self._settings.lookup_rpc_port, self._vllm_config.parallel_config.data_parallel_rank
        )

    def _make_scheduler(self, store_settings: StoreSettings) -> PoolScheduler:
        transfer = self._vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            logger.error(
                "event=load_failure_policy kv_load_failure_policy=%r: the engine will fail requests whose cached "
                'blocks cannot be loaded; set "kv_load_failure_policy": "recompute" in the kv_transfer_config: a cache '
                "must never fail a request",
                transfer.kv_load_failure_policy,
            )
        rules = [rule_of(group.kv_cache_spec, self._topology) for group in self._cache_config.kv_cache_groups]
        settings, consumer = self._settings, transfer.kv_role == "kv_consumer"
        outage = Outage(MonotonicClock(), settings.outage_pause_s)
        if publishes_events(self._vllm_config):
            self._events = BlockEvents()
            if not REPORTS_LOADS:
                logger.error(
                    "event=no_kv_events: this vLLM does not carry to the scheduler what workers have stored; of the "
                    "pool, KV events tell only of resets. vLLM 0.23 can"
                )
        can_fail = len(rules) == 1 or REPORTS_FAILED_REQUESTS
        if not can_fail:
            logger.error(
                "event=no_loads: this vLLM cannot recover from a failed load of a model with %d KV cache groups; "
                "blocks are saved but not loaded. vLLM 0.32 can",
                len(rules),
            )
        history = History(settings.remember_requests) if settings.remember_requests else None
        scheduler = PoolScheduler(
            rules,
            hash_block_size_of(self._vllm_config, self._cache_config, self._topology),
            self._make_lookup(store_settings, outage),
            loads=can_fail and (not consumer or settings.consumer_is_to_load),
            saves=not consumer or settings.consumer_is_to_put,
            load_between_steps=settings.load_async or not EVICTS_BLOCKS,
            save_decode_cache=settings.save_decode_cache,
            # One step may be in flight with asynchronous scheduling, and one a stage with pipeline parallelism.
            confirm_after_steps=None if REPORTS_LOADS else 1 + self._topology.pp_size,
            min_tokens_to_load=settings.min_tokens_to_load,
            trace=trace_of(self._vllm_config),
            events=self._events,
            history=history,
        )
        self._history_server = serve_history(history) if history else None
        return scheduler

    def _make_lookup(self, store_settings: StoreSettings, outage: Outage) -> Lookup:
        """Ask the store directly where a client takes no device, else through the first worker."""
        limit = self._settings.lookup_timeout_s
        if store_settings.protocol == "ascend":
            return SocketLookup(self._lookup_path(), outage, limit)
        # This client gives no memory and moves no bytes.
        guest = store_settings.model_copy(update={"global_segment_size": 0, "local_buffer_size": 0})
        store = MooncakeStore(guest, self._settings)
        store.connect()
        tell_joined(store, guest)
        return StoreLookup(store, outage, limit)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True where layers are moved by themselves: a graph of the whole step would skip the layers' hooks."""
        return bool(PoolSettings.from_extra_config(extra_config).use_layerwise)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a later miss."""
        return False

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `kvpool_connector.worker.PoolWorker.register`."""
        orders = orders_of(self._vllm_config, self._settings, order_of_axes())
        groups = groups_of(self._vllm_config, self._cache_config, kv_caches, orders)
        self._announced = self._workers().register(kv_caches, groups)
        self._unreported = (self._announced,)

    def get_handshake_metadata(self) -> PoolHandshake | None:
        """What this rank holds."""
        return PoolHandshake(self._announced) if self._announced else None

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before anything is overwritten. (Up to 0.14 the argument is a set of request ids and says nothing of use.)"""
        if isinstance(kv_connector_metadata, PoolMetadata):
            self._begin(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The step's work; the first hook of a step in every version."""
        super().bind_connector_metadata(connector_metadata)
        self._begin(self._step())

    def _begin(self, step: StepMetadata) -> None:
        if self._begun is not step:
            self._begun = step
            self._workers().begin_step(step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See `kvpool_connector.worker.PoolWorker.start_loads`."""
        self._workers().start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `kvpool_connector.worker.PoolWorker.wait_layer`."""
        if self._by_layers:
            self._workers().wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """See `kvpool_connector.worker.PoolWorker.save_layer`."""
        if self._by_layers:
            self._workers().save_layer(layer_name)

    def wait_for_save(self) -> None:
        """See `kvpool_connector.worker.PoolWorker.end_step`."""
        self._workers().end_step(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests that are saved, and requests that are loaded."""
        ended, _ = self._workers().take_loaded()
        return self._workers().take_saved() or None, ended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same with failures by request, which is how an engine with several groups wants them (0.32)."""
        ended, failed = self._workers().take_loaded()
        return _TransferResults(
            finished_sending=self._workers().take_saved(),
            finished_recving=ended,
            failed_recving=failed if self._has_several_groups else set(),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute instead. Block ids mean nothing to an engine with several groups."""
        failed = self._workers().take_failed_blocks()
        return set() if self._has_several_groups else failed

    def build_connector_worker_meta(self) -> PoolWorkerMetadata | None:
        """Outcome of the loads."""
        report = self._workers().take_report()
        announced, self._unreported = self._unreported, ()
        return PoolWorkerMetadata(report or LoadReport(), announced) if report or announced else None

    # Scheduler side

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """What the workers hold (by tensor-parallel rank, before 0.23).

        `MultiConnector` hands every child what the first that announces anything has announced: it may be another's.
        """
        announced = [handshake.shards for handshake in metadata.values() if isinstance(handshake, PoolHandshake)]
        namespaces = {one.namespace for one in announced}
        # One namespace that is not ours is another child's; several are ranks that disagree, which is refused.
        is_anothers = len(namespaces) == 1 and self._settings.namespace not in namespaces
        if len(announced) == len(metadata) and not is_anothers:
            self._set_shards(announced)

    def _set_shards(self, announced: Iterable[RankShards]) -> None:
        self._schedulers().set_shards(ShardMap(self._topology, with_prefill_ranks(self._topology, announced)))

    def _set_late_shards(self, announced: Iterable[RankShards]) -> None:
        """Of announcements that came with the first step: requests are being served, and none may fail by the pool."""
        try:
            self._set_shards(announced)
        except TopologyError as error:
            self._told_pool_off = True
            logger.error(
                "event=ranks_disagree: %s. The pool is off, and serving goes on without it. The engine did not refuse "
                "to start since a parent connector hands on one child's announcements only; as the first child this "
                "connector finds it out at start",
                error,
            )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the workers hold."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """See `kvpool_connector.scheduler.PoolScheduler.num_matched_tokens`."""
        if not self._schedulers().ready and not self._told_pool_off and self._num_steps >= self._announced_after:
            self._told_pool_off = True
            logger.error(
                "event=no_handshake: the workers' announcements did not reach the scheduler side, so the pool is off. "
                "A parent connector that does not pass on set_xfer_handshake_metadata is the usual cause"
            )
        return self._schedulers().num_matched_tokens(view_of(request), num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See `kvpool_connector.scheduler.PoolScheduler.allocated`."""
        tables = tables_of(blocks) if num_external_tokens > 0 else ()
        self._schedulers().allocated(view_of(request), tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PoolMetadata:
        """See `kvpool_connector.scheduler.PoolScheduler.build_step`."""
        self._num_steps += 1
        return PoolMetadata(self._schedulers().build_step(scheduled_of(scheduler_output)))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `kvpool_connector.scheduler.PoolScheduler.report`."""
        if connector_output.invalid_block_ids:
            self._schedulers().blocks_failed(connector_output.invalid_block_ids)
        metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(metadata, PoolWorkerMetadata):
            if metadata.announced:
                self._set_late_shards(metadata.announced)
            self._schedulers().report(metadata.report)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `kvpool_connector.scheduler.PoolScheduler.finished`."""
        completed = request.status in ENDED_BY_ITSELF
        return self._schedulers().finished(request.request_id, request.num_tokens, completed=completed), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for several groups."""
        return self.request_finished(request, [])

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The engine's prefix cache, from which blocks of failed loads are taken."""
        self._schedulers().bind_cache(gpu_block_pool.evict_blocks)

    def take_events(self) -> list[KVCacheEvent]:
        """What the pool has got from this engine since the last call, and resets."""
        return [event_of(block) for block in self._events.take()] if self._events else []

    def reset_cache(self) -> bool:
        """See `kvpool_connector.scheduler.PoolScheduler.reset`."""
        return self._schedulers().reset()

    # Both

    def get_kv_connector_stats(self) -> PoolStats | None:
        """What was counted since the last call."""
        side = self._worker or self._scheduler
        counts = side.counters.take() if side else {}
        return PoolStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        """Stats from the plain data that vLLM carries between processes."""
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolPromMetrics:
        """The counts for the engine's `/metrics`."""
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Store what is queued and leave."""
        for side in (self._history_server, self._worker, self._scheduler):
            if side:
                side.close()

    @property
    def _has_several_groups(self) -> bool:
        return len(self._cache_config.kv_cache_groups) > 1

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PoolMetadata), f"foreign metadata {type(metadata).__name__}"
        return metadata.step

    def _workers(self) -> PoolWorker:
        assert self._worker is not None, "a worker's hook was called on the scheduler side"
        return self._worker

    def _schedulers(self) -> PoolScheduler:
        assert self._scheduler is not None, "a scheduler's hook was called on the worker side"
        return self._scheduler


class AscendStoreConnector(KVPoolConnector):
    """The same under the name that vLLM-Ascend's configurations have."""


def register() -> None:
    """Entry point `vllm.general_plugins`: make the connector known by its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = KVPoolConnector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "kvpool_connector.vllm", name)


def tell_joined(store: MooncakeStore, settings: StoreSettings) -> None:
    """Say where this process listens from now on."""
    logger.info(
        "event=joined master=%s as=%s protocol=%s segment_bytes=%d: Mooncake's client listens for other clients, on "
        "every interface of this machine",
        settings.master_server_address,
        store.address,
        settings.protocol,
        settings.global_segment_size,
    )


def trace_of(config: VllmConfig) -> Trace | None:
    """How spans are sent, where the engine traces (`--otlp-traces-endpoint`; vLLM 0.23 or newer); else None."""
    if not config.observability_config.otlp_traces_endpoint:
        return None
    from vllm import tracing

    send = getattr(tracing, "instrument_manual", None)
    if send is None or not tracing.is_tracing_available():
        return None

    def trace(span: Span) -> None:
        context = tracing.extract_trace_context(dict(span.headers))
        send(span.name, span.start_ns, span.end_ns, dict(span.attributes), context)

    return trace


def publishes_events(config: VllmConfig) -> bool:
    """Whether the engine publishes KV events."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def event_of(block: StoredBlock | None) -> KVCacheEvent:
    """The engine's event for a block that is in the pool, or for a reset."""
    if block is None:
        return kv_events.AllBlocksCleared()
    name = kv_cache_utils.maybe_convert_block_hash
    fields = {
        "block_hashes": [name(block.block_hash)],
        "parent_block_hash": None if block.parent is None else name(block.parent),
        "token_ids": list(block.token_ids),
        "block_size": block.block_size,
        "lora_id": None,
        "lora_name": block.lora_name,
        "medium": MEDIUM,
        "group_idx": block.group,
        # Every engine of the pool can load it (0.32).
        "locality": "REMOTE",
    }
    known = kv_events.BlockStored.__struct_fields__
    return kv_events.BlockStored(**{field: value for field, value in fields.items() if field in known})


def this_rank() -> Rank:
    """This worker's coordinates."""
    from vllm.distributed import parallel_state

    pcp = getattr(parallel_state, "get_pcp_group", None)
    return Rank(
        pp=parallel_state.get_pp_group().rank_in_group,
        pcp=pcp().rank_in_group if pcp else 0,
        tp=parallel_state.get_tp_group().rank_in_group,
    )


def this_device() -> Device:
    """The device that holds the KV cache. Raises `ConfigError` for one that the pool does not know."""
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if kind == "cpu":
        return HostDevice()
    if kind == "npu":
        from vllm.distributed.parallel_state import get_world_group

        from kvpool_connector.ascend import AscendDevice

        return AscendDevice(get_world_group().local_rank)
    raise ConfigError(f"device type {kind!r} is not supported; expected 'npu' or 'cpu'")


def shared_engine(settings: StoreSettings) -> SharedEngine | None:
    """The transfer engine that vLLM-Ascend's connectors in this process share; None where there is none to share."""
    if settings.protocol != "ascend" or settings.fabric_memory:
        return None
    try:
        from vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine import global_te
    except ImportError as error:
        logger.warning(
            "event=own_transfer_engine error=%s: this vLLM-Ascend has no transfer engine to share, so Mooncake makes "
            "another; beside a second connector with Mooncake it may find no room on the device",
            error,
        )
        return None
    engine: SharedEngine = global_te
    return engine


def order_of_axes() -> str:
    """Meaning of a page's axes: vLLM on a CPU has heads first, vLLM-Ascend tokens first; others are not known."""
    from vllm.platforms import current_platform

    return {"cpu": "HND", "npu": "NHD"}.get(current_platform.device_type, "")


__all__ = ["AscendStoreConnector", "KVPoolConnector", "register"]
