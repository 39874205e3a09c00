"""The worker side: one rank's part of the pool. No vLLM, no Mooncake, no NPU in here.

A step, in the engine's order: `begin_step` (before anything is written), `start_loads`, the forward pass with
`wait_layer` and `save_layer` for each layer, `end_step`, then the `take_*` reports.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvpool_connector.answers import statuses_of
from kvpool_connector.audit import Audit
from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.clock import Clock, MonotonicClock
from kvpool_connector.contract.descriptor import Descriptor, ModelIdentity
from kvpool_connector.contract.device import CHECKSUM_BYTES, DEVICE_LIMIT_S, Device, Event
from kvpool_connector.contract.errors import ConfigError, StoreSetupError
from kvpool_connector.contract.layout import Region, ShardLayout
from kvpool_connector.contract.shards import RankShards
from kvpool_connector.contract.store import CacheStore, SessionStore, Store
from kvpool_connector.contract.topology import HeadRange, Rank, Topology
from kvpool_connector.counters import Counters
from kvpool_connector.epoch import newest_epoch
from kvpool_connector.events import StoredKeys
from kvpool_connector.fence import Fence
from kvpool_connector.hashing import Hashing, check_hashing
from kvpool_connector.head_split import split_heads
from kvpool_connector.integrity import SAMPLE_EVERY, Integrity, spacing
from kvpool_connector.layer_cost import Work, pays
from kvpool_connector.layer_loader import LayerLoad, LayerLoader
from kvpool_connector.layer_plan import LayerPlan
from kvpool_connector.layer_saver import LayerSave, LayerSaver
from kvpool_connector.layer_transfer import LayerTransfer
from kvpool_connector.learnt_transfer import LearntTransfer
from kvpool_connector.loader import Load, Loader
from kvpool_connector.lookup_socket import LookupServer
from kvpool_connector.metadata import LoadJob, LoadReport, SaveJob, StepMetadata
from kvpool_connector.outage import Outage
from kvpool_connector.rank_part import RankPart, ShardBlocks
from kvpool_connector.registration import GroupSpec, merged, read_layouts
from kvpool_connector.saver import Saver
from kvpool_connector.staging import Staging
from kvpool_connector.tracing import SaveSpan, Timer, Trace
from kvpool_connector.transfer import DirectTransfer, PackedTransfer, Transfer

logger = logging.getLogger(__name__)

NOTHING = LoadReport()


class PoolWorker:
    """Saves and loads this rank's shards of blocks."""

    def __init__(
        self,
        settings: PoolSettings,
        store: Store,
        device: Device,
        topology: Topology,
        rank: Rank,
        model: ModelIdentity,
        clock: Clock | None = None,
        trace: Trace | None = None,
        hashing: Hashing | None = None,
        reports_stored: bool = False,
    ) -> None:
        """`store` is connected; the worker closes it. `hashing`: how the engine names blocks, where that is known.

        `reports_stored`: say in each report which objects are in the pool now.
        """
        self._settings = settings
        self._store = store
        self._device = device
        self._topology = topology
        self._rank = rank
        self._model = model
        self._clock = clock or MonotonicClock()
        self._trace = trace
        self._hashing = hashing
        self._stored = StoredKeys() if reports_stored else None
        self._timers: dict[str, tuple[Timer, int]] = {}
        self.counters = Counters()
        self._fence = Fence(settings.fence_timeout_s)
        self._outage = Outage(self._clock, settings.outage_pause_s)
        self._part: RankPart | None = None
        self._descriptors: list[Descriptor] = []
        self._epoch = 0
        self._step_number = 0
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._step_loads: list[Load] = []
        self._layer_plan: LayerPlan | None = None
        self._layer_saver: LayerSaver | None = None
        self._layer_loader: LayerLoader | None = None
        self._layer_save: LayerSave | None = None
        self._saves_by_layers = False
        self._layer_load: LayerLoad | None = None
        self._open_loads: list[Load] = []
        self._before_step: Event | None = None
        self._failed_blocks: set[int] = set()
        self._saved_requests: set[str] = set()
        self._report = NOTHING
        self._lookup_server: LookupServer | None = None
        self._staging: Staging | None = None
        self._sample_every = SAMPLE_EVERY.get(settings.integrity)
        self._integrity: list[Integrity | None] = []
        self._audits: list[Audit | None] = []

    def serve_lookups(self, path: Path) -> None:
        """Answer the scheduler side's lookups at a local socket, where it has no store client of its own."""
        self._lookup_server = LookupServer(self._store, path)

    def register(self, kv_caches: Mapping[str, Any], groups: Sequence[GroupSpec]) -> RankShards:
        """Read the layouts, make the memory known to the store, announce what this rank holds.

        `groups` lists every KV cache group of the engine; one without layers on this rank has no layer names. Raises
        `LayoutError`, `ConfigError` or `StoreSetupError`.
        """
        cuts = self._topology.cuts
        held = [index for index, group in enumerate(groups) if group.layer_names]
        whole = [
            replace(layout, group=index, layers=layers)
            for layout, index in zip(read_layouts(kv_caches, [groups[i] for i in held]), held, strict=True)
            for part in range(cuts.num_parts)
            if (layers := tuple(layer for layer in layout.layers if cuts.part(layer.label) == part))
        ]
        topologies = [self._topology.with_heads(group.num_heads) for group in groups]
        layouts, heads = self._split(whole, groups, topologies)
        context = self._topology.context(self._rank)
        transfers, checksum = self._transfers(layouts, kv_caches)
        self._descriptors = [
            Descriptor.of(layout, self._model, some, context, checksum)
            for layout, some in zip(layouts, heads, strict=True)
        ]
        namespace = self._settings.namespace
        self._epoch = newest_epoch(lambda keys: statuses_of(self._store.exist, keys), namespace)
        writers = tuple(topology.writer(self._rank) for topology in topologies)
        descriptors = tuple(
            tuple(one for one in self._descriptors if one.group == index) for index in range(len(groups))
        )
        announced = RankShards(self._rank, namespace, self._epoch, writers, descriptors)
        self._part = RankPart(announced)
        self._describe(self._part, self._epoch)
        settings = self._settings
        self._saver = Saver(
            transfers,
            self._fence,
            self._outage,
            self.counters,
            settings.max_queued_blocks,
            DEVICE_LIMIT_S,
            self._stored,
        )
        self._loader = Loader(transfers, self._outage, self.counters, self._clock, settings.load_timeout_s)
        if settings.use_layerwise:
            states = [index for index, group in enumerate(groups) if group.kind == "state"]
            self._go_by_layers(layouts, kv_caches, [transfer.stored_bytes for transfer in transfers], states)
        return announced

    def _describe(self, part: RankPart, epoch: int) -> None:
        """Say in the pool what it holds, for people, tools and other engines; one that is full or down does without."""
        if self._hashing is not None and self._rank == Rank():
            check_hashing(self._hashing, self._store, self._settings.namespace, epoch)
        for shard, descriptor in zip(part.shards, self._descriptors, strict=True):
            if part.writers[descriptor.group].index == 0:
                self._store.write(replace(shard, epoch=epoch).descriptor_key(), descriptor.to_json().encode())

    def _split(
        self, layouts: Sequence[ShardLayout], groups: Sequence[GroupSpec], topologies: Sequence[Topology]
    ) -> tuple[list[ShardLayout], list[HeadRange]]:
        """The layouts of this rank's shards and the heads of each: as given, or split as `kv_head_split` says."""
        split = self._settings.kv_head_split
        if split == "rank":
            return list(layouts), [topologies[layout.group].heads(self._rank) for layout in layouts]
        states = [i for i, group in enumerate(groups) if group.kind == "state"]
        if states:
            raise ConfigError(
                f"kv_head_split = {json.dumps(split)}, but KV cache group {states[0]} holds states, which have no KV "
                'heads and are stored a rank: no other tensor parallel size could use them. Set kv_head_split to "rank"'
            )
        parts: list[ShardLayout] = []
        heads: list[HeadRange] = []
        for layout in layouts:
            topology = topologies[layout.group]
            per_shard = topology.heads_per_shard(split)
            parts += split_heads(layout, topology.heads(self._rank).count, per_shard)
            heads += topology.shard_heads(self._rank, per_shard)
        return parts, heads

    def _go_by_layers(
        self,
        layouts: Sequence[ShardLayout],
        kv_caches: Mapping[str, Any],
        object_bytes: Sequence[int],
        states: Sequence[int],
    ) -> None:
        """`states`: KV cache groups whose blocks hold states; vLLM calls no hooks for them."""
        settings, store = self._settings, self._store
        if not isinstance(store, SessionStore):
            raise ConfigError(
                f"use_layerwise is {json.dumps(settings.use_layerwise)}, but the store ({type(store).__name__}) has no "
                "sessions; set use_layerwise to false"
            )
        assert self._staging is not None, "layers pass through staging"
        self._layer_plan = plan = LayerPlan(layouts, settings.layerwise_layers_per_transfer, states)
        limit = settings.load_timeout_s
        transfer = LayerTransfer(
            store,
            self._device,
            plan,
            kv_caches,
            self._staging,
            limit,
            self._integrity,
            [audit is not None for audit in self._audits],
        )
        self._layer_saver = LayerSaver(
            transfer,
            plan,
            object_bytes,
            self._fence,
            self._outage,
            self.counters,
            self._clock,
            settings.max_queued_blocks,
            DEVICE_LIMIT_S,
            settings.layerwise_session_limit_s,
            self._audits,
            self._stored,
        )
        self._layer_loader = LayerLoader(
            transfer,
            plan,
            object_bytes,
            self._outage,
            self.counters,
            self._clock,
            limit,
            settings.layerwise_renew_s,
            settings.layerwise_prefetch_layers,
        )

    def _transfers(self, layouts: Sequence[ShardLayout], kv_caches: Mapping[str, Any]) -> tuple[list[Transfer], str]:
        """A way of moving each shard's blocks, and the algorithm of the objects' checksums."""
        way = self._settings.transfer
        if way != "direct" or self._settings.use_layerwise:
            sums = CHECKSUM_BYTES * (bool(self._sample_every) + bool(self._settings.audit_every))
            largest = max((layout.object_bytes + sums * len(layout.components) for layout in layouts), default=1)
            self._staging = Staging(self._store, self._device, self._settings.staging_bytes, largest)
        if way == "direct":
            self._integrity, self._audits = [None] * len(layouts), [None] * len(layouts)
            return self._direct(layouts), ""
        packed, algorithm = self._packed(layouts, kv_caches)
        if way != "learnt":
            return packed, algorithm
        try:
            direct = self._direct(layouts)
        except (ConfigError, StoreSetupError) as error:
            logger.warning("event=transfer_way way=packed: direct transfer is not possible here: %s", error)
            return packed, algorithm
        return [LearntTransfer(*ways, self._clock) for ways in zip(packed, direct, strict=True)], algorithm

    def _direct(self, layouts: Sequence[ShardLayout]) -> list[Transfer]:
        """Raises `ConfigError` or `StoreSetupError` where the cache cannot be moved piece by piece."""
        limit = self._settings.max_buffers_per_call
        for layout in layouts:
            if layout.num_pieces > limit:
                raise ConfigError(
                    f"{layout.num_pieces} pieces of a block are moved at once, more than "
                    f'max_buffers_per_call = {limit}; set transfer to "packed"'
                )
        self._register_cache(merged(region for layout in layouts for region in layout.regions))
        return [DirectTransfer(self._store, layout, limit) for layout in layouts]

    def _packed(self, layouts: Sequence[ShardLayout], kv_caches: Mapping[str, Any]) -> tuple[list[Transfer], str]:
        sample_every, staging = self._sample_every, self._staging
        assert staging is not None
        packed: list[Transfer] = []
        algorithm = ""
        for shard_layout in layouts:
            stride = spacing(shard_layout) if sample_every else None
            copier = self._device.copier(shard_layout, kv_caches, staging.buffer, stride)
            integrity, audit, every = None, None, self._settings.audit_every
            if sample_every or every:
                checksums = self._device.checksums(shard_layout, staging.buffer, stride)
                if sample_every:
                    algorithm, integrity = checksums.algorithm, Integrity(checksums, shard_layout, sample_every)
                if every:
                    trailer = integrity.trailer_bytes if integrity else 0
                    audit = Audit(self._store, checksums, shard_layout, staging, trailer, every, self.counters, stride)
            self._integrity.append(integrity)
            self._audits.append(audit)
            limit = self._settings.load_timeout_s
            packed.append(PackedTransfer(self._store, shard_layout, copier, staging, limit, integrity, audit))
        return packed, algorithm

    def _register_cache(self, regions: Sequence[Region]) -> None:
        """Raises `StoreSetupError`."""
        if isinstance(self._store, CacheStore) and self._store.register_shared(regions):
            return
        for region in regions:
            if not (status := self._store.register(region.address, region.num_bytes)).ok:
                raise StoreSetupError(
                    f"the store did not register the KV cache at {region.address:#x} ({region.num_bytes} bytes): "
                    f"{status}; check the device's limits for registered memory"
                )

    def begin_step(self, step: StepMetadata) -> None:
        """Before the step writes anything: let go of the blocks that it will overwrite, and of ended requests'."""
        if self._layer_save is not None and self._layer_saver is not None:
            self._layer_saver.close(self._layer_save, None)
        self._layer_save = None
        self._end_layer_load()
        self._device.order_late_copies()
        self._step_number = step.number
        if step.saves:
            self._begin_saves(step.saves)
        if step.overwritten:
            self.counters.add("save_blocks_dropped_overwritten", self._fence.overwrite(step.overwritten))
        if step.loads:
            # A step in flight may still write blocks whose request has ended; a load must come behind it.
            self._before_step = self._device.record_event()
        if self._layer_saver is not None:
            saves = [save for job in step.saves if not job.final for save in self._shard_saves(job)]
            self._saves_by_layers = self._by_layers(saves)
            self._layer_save = self._layer_saver.open(saves) if self._saves_by_layers else None

    def _begin_saves(self, jobs: Sequence[SaveJob]) -> None:
        newest = max(job.epoch for job in jobs)
        if newest > self._epoch:
            self._epoch = newest
            assert self._saver is not None and self._part is not None, "register() comes first"
            self._part.move(newest)
            self._saver.soon(partial(self._describe, self._part, newest))
        final = [job for job in jobs if job.final]
        if final:
            # Computed by earlier steps, so the event of now is late enough.
            self._submit(final)
            blocks = frozenset(block_id for job in final for group in job.blocks for block_id in group.block_ids)
            self.counters.add("save_blocks_dropped_overwritten", self._fence.overwrite(blocks))
            self._saved_requests.update(job.request_id for job in final)

    def start_loads(self, step: StepMetadata) -> None:
        """Begin this step's loads; return when those that the step computes on have ended, well or not.

        Layer by layer it returns at once, and `wait_layer` waits for a layer's part of them.
        """
        if not step.loads:
            return
        by_layers: dict[str, list[ShardBlocks]] = {}
        if self._layer_loader is not None:
            for job in step.loads:
                if not job.between_steps:
                    by_layers.setdefault(job.request_id, []).extend(self._shard_loads(job))
            if not self._by_layers([load for loads in by_layers.values() for load in loads]):
                by_layers.clear()
        for job in step.loads:
            assert self._before_step is not None, "begin_step() comes first"
            if self._trace:
                timer = Timer(self._trace, "kvpool.load", job.request_id, job.trace_headers)
                self._timers[job.request_id] = timer, sum(len(group.block_ids) for group in job.blocks)
            if job.request_id in by_layers and not job.between_steps:
                continue
            load = self._loads().start(job.request_id, self._shard_loads(job), self._before_step)
            (self._open_loads if job.between_steps else self._step_loads).append(load)
        for load in self._step_loads:
            failed = self._loads().finish(load)
            self._note(load.request_id, failed, self._loads().elapsed_s(load))
        self._step_loads.clear()
        if by_layers and self._layer_loader is not None and self._before_step is not None:
            self._layer_load = self._layer_loader.start(by_layers, self._before_step)
        # States of a load that was given up just now are written by this very step.
        self._device.order_late_copies()

    def wait_layer(self, layer_name: str) -> None:
        """In front of a layer's attention: return when all that it reads of this step's loads has landed, or failed."""
        if self._layer_load is not None and self._layer_loader is not None:
            self._layer_loader.wait(self._layer_load, layer_name)

    def save_layer(self, layer_name: str) -> None:
        """After a layer's attention: its part of this step's saves may go."""
        if self._layer_save is not None and self._layer_saver is not None:
            self._layer_saver.computed(self._layer_save, layer_name, self._device.record_event())

    def _by_layers(self, moves: Sequence[ShardBlocks]) -> bool:
        """Whether a step moves these blocks layer by layer: always, or when it pays."""
        assert self._layer_plan is not None, "register() comes first"
        if self._settings.use_layerwise != "auto" or not moves:
            return bool(moves)
        num_blocks = Counter[int]()
        for move in moves:
            num_blocks[move.shard] += len(move.block_ids)
        ranges = self._layer_plan.ranges
        return pays(
            [
                Work(
                    count,
                    sum(piece.layout.object_bytes for piece in ranges[shard]),
                    len(ranges[shard]),
                    checksums=self._integrity[shard] is not None,
                )
                for shard, count in num_blocks.items()
            ]
        )

    def _end_layer_load(self) -> None:
        if self._layer_load is not None and self._layer_loader is not None:
            for request_id, failed in self._layer_loader.settle(self._layer_load).items():
                self._note(request_id, failed)
        self._layer_load = None

    def _note(self, request_id: str, failed: Sequence[int], seconds: float | None = None) -> None:
        """A load has ended; `seconds` after it began, where it overlapped with no computing."""
        self._failed_blocks.update(failed)
        if timed := self._timers.pop(request_id, None):
            timer, num_blocks = timed
            timer.end(blocks=num_blocks, failed_blocks=len(set(failed)), rank=str(self._rank))
        outcome = frozenset((request_id,))
        measured = {} if seconds is None or failed else {request_id: seconds}
        self._report = self._report.merge(
            LoadReport(failed=outcome) if failed else LoadReport(loaded=outcome, seconds=measured)
        )

    def end_step(self, step: StepMetadata) -> None:
        """After the forward pass: queue this step's saves, and end its loads."""
        self._end_layer_load()
        if not self._saves_by_layers:
            if step.saves:
                self._submit([job for job in step.saves if not job.final])
        elif self._layer_save is not None and self._layer_saver is not None:
            self._layer_saver.close(self._layer_save, self._device.record_event())
            self._layer_save = None

    def _submit(self, jobs: Sequence[SaveJob]) -> None:
        if jobs:
            assert self._saver is not None, "register() comes first"
            event = self._device.record_event()
            for job in jobs:
                self._saver.submit(self._shard_saves(job), event)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose load between steps has ended, and those of them that failed somewhere; each once."""
        ended: set[str] = set()
        failed_requests: set[str] = set()
        if not self._open_loads:
            return ended, failed_requests
        for load in self._open_loads[:]:
            if load.done or self._loads().overdue(load):
                self._open_loads.remove(load)
                ended.add(load.request_id)
                failed = self._loads().settle(load)
                self._note(load.request_id, failed, self._loads().elapsed_s(load))
                if failed:
                    failed_requests.add(load.request_id)
        return ended, failed_requests

    def take_saved(self) -> set[str]:
        """Ended requests whose blocks no save needs any more; each once."""
        saved, self._saved_requests = self._saved_requests, set()
        return saved

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and do not hold their content; each once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> LoadReport | None:
        """Outcome of the loads and saves that ended since the last call, and of the step; None with nothing to say."""
        number, self._step_number = self._step_number, 0
        if self._report is NOTHING and self._stored is None and not number:
            return None
        report, self._report = self._report, NOTHING
        if self._stored is not None:
            stored, present = self._stored.take()
            report = replace(report, stored=stored, present=present)
        return replace(report, step=number) if report != NOTHING or number else None

    def drain(self, timeout_s: float) -> bool:
        """True once all saves that were queued have ended; False when that took longer than `timeout_s` seconds."""
        return self._saver is None or self._saver.drain(timeout_s)

    def close(self) -> None:
        """Store what is queued, within `drain_timeout_s`, and leave the store."""
        if self._lookup_server is not None:
            self._lookup_server.close()
        if self._saver is None or self._loader is None:
            self._store.close()
            return
        if self._layer_save is not None and self._layer_saver is not None:
            # In the middle of a step: nothing of it appears.
            self._layer_saver.close(self._layer_save, None)
            self._layer_save = None
        self._end_layer_load()
        drained = self.drain(self._settings.drain_timeout_s)
        if not drained:
            logger.warning("event=drain_incomplete limit_s=%g", self._settings.drain_timeout_s)
        self._loader.close()
        if self._layer_loader is not None and self._layer_saver is not None:
            self._layer_loader.close()
            self._layer_saver.finish()
        # Mooncake crashes the process when it is closed under a call: an unfinished thread keeps it open.
        if self._saver.close():
            self._store.close()

    def _loads(self) -> Loader:
        assert self._loader is not None, "register() comes first"
        return self._loader

    def _shard_loads(self, job: LoadJob) -> list[ShardBlocks]:
        assert self._part is not None, "register() comes first"
        return self._part.of_load(job)

    def _shard_saves(self, job: SaveJob) -> list[ShardBlocks]:
        assert self._part is not None, "register() comes first"
        saves = self._part.of_save(job)
        if self._trace and saves:
            timer = Timer(self._trace, "kvpool.save", job.request_id, job.trace_headers)
            span = SaveSpan(timer, sum(len(save.block_ids) for save in saves), str(self._rank))
            saves = [replace(save, span=span) for save in saves]
        return saves
