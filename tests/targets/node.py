"""A node: one rank's worker side over simulated caches, on any store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvpool_conformance.cases import CacheCase, Deployment
from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.shards import RankShards, ShardMap
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import SessionStore
from kvpool_connector.contract.topology import Topology
from kvpool_connector.metadata import GroupBlocks, LoadJob, SaveJob, StepMetadata
from kvpool_connector.registration import GroupSpec
from kvpool_connector.worker import PoolWorker
from kvpool_simulator.device import Caches, allocate
from kvpool_simulator.device.arena import Bytes
from kvpool_simulator.device.content import page_content
from kvpool_simulator.device.spec import Order
from tests.targets.caches import cache_spec, content_name
from tests.targets.memory import HostMemory, Memory


def block_hash(content: str) -> bytes:
    """What the engine would call the block's hash."""
    return hashlib.sha256(content.encode()).digest()


def topology_of(deployment: Deployment) -> Topology:
    """A latent cache has one head."""
    heads = deployment.case.num_heads if deployment.case.family in ("gqa", "gqa-310p") else 1
    copies = deployment.case.indexer_copies
    return Topology(
        heads,
        max(deployment.tp_size, copies),
        pcp_size=deployment.pcp_size,
        dcp_size=max(deployment.dcp_size, copies),
        cp_interleave=deployment.interleave,
    )


def group_spec(caches: Caches, group: int, case: CacheCase, topology: Topology) -> GroupSpec:
    """What the engine says of a group: its layers, its tokens a block, and whether its pages are in NZ order."""
    names = tuple(entry.layer_name for entry in caches.spec.entries if entry.group == group)
    place = caches.places[names[0]][0]
    tokens = place.component.num_tokens * place.kernel_blocks
    kind = "attention" if topology.num_kv_heads > 1 or case.family in ("gqa", "attention-and-mamba") else "latent"
    return GroupSpec(
        names,
        tokens or case.block_size,
        caches.num_blocks,
        order="NZ" if place.component.order is Order.NZ else "NHD",
        kind=kind if tokens else "state",
        context_size=topology.cp_size,
        num_heads=None if tokens else topology.tp_size,
    )


def _transfer_settings(transfer: str) -> dict[str, object]:
    """`layerwise` is packed transfer, a layer at a time, however small the layers are."""
    if transfer != "layerwise":
        return {"transfer": transfer}
    return {"transfer": "packed", "use_layerwise": True, "layerwise_layers_per_transfer": 1}


class LocalNode:
    """A `kvpool_conformance.backend.Node` in this process."""

    def __init__(
        self,
        deployment: Deployment,
        rank: int,
        store: SessionStore,
        staging_bytes: int = 8 << 20,
        memory: Memory | None = None,
        **more: object,
    ) -> None:
        """`more`: further settings. `store` is connected; `close` closes it. `memory`: by default the host's."""
        case = deployment.case
        spec = cache_spec(case, deployment.tp_size, rank)
        self._groups = sorted({entry.group for entry in spec.entries})
        # One content stands for a block of every group, and no block id is in two groups.
        self._caches = allocate(spec, case.num_blocks * len(self._groups), extra_blocks=case.spare_blocks)
        self._group_of = {entry.layer_name: self._groups.index(entry.group) for entry in spec.entries}
        self._memory = memory or HostMemory()
        self._store = store
        self._topology = topology_of(deployment)
        self._rank = list(self._topology.ranks())[rank]
        context = self._topology.context(self._rank)
        self._part = f"{context.position} of {context.size}" if context.size > 1 else ""
        settings = {
            "namespace": deployment.namespace,
            **_transfer_settings(deployment.transfer),
            "kv_head_split": deployment.kv_head_split,
            "integrity": deployment.integrity,
            "staging_bytes": staging_bytes,
            "load_timeout_s": 60,
            **more,
        }
        self._worker = PoolWorker(
            PoolSettings.model_validate(settings),
            store,
            self._memory.device,
            self._topology,
            self._rank,
            ModelIdentity(deployment.model),
        )
        groups = [group_spec(self._caches, group, case, self._topology) for group in self._groups]
        self._topologies = [self._topology.with_heads(group.num_heads) for group in groups]
        self._announced = self._worker.register(self._memory.place(self._caches), groups)
        self._snapshot = self._caches.snapshot()

    def all_ranks(self) -> list[RankShards]:
        """What every rank of the deployment announces: they differ in their heads and tokens alone."""
        ranks = []
        for rank in self._topology.ranks():
            context = self._topology.context(rank)
            descriptors = tuple(
                tuple(
                    replace(
                        one,
                        heads=replace(one.heads, first=topology.heads(rank).first + i * one.heads.count),
                        context=context,
                    )
                    for i, one in enumerate(of_group)
                )
                for of_group, topology in zip(self._announced.descriptors, self._topologies, strict=True)
            )
            writers = tuple(topology.writer(rank) for topology in self._topologies)
            ranks.append(replace(self._announced, rank=rank, descriptors=descriptors, writers=writers))
        return ranks

    def fill(self, contents: Mapping[int, str]) -> None:
        for layer_name, index, block_id, content in self._contents(contents):
            self._caches.write(layer_name, index, block_id, self._expected(layer_name, index, content))
        self._memory.to_device()

    def save(self, contents: Mapping[int, str]) -> int:
        before = self._worker.counters.totals()
        step = StepMetadata(saves=(SaveJob("request", self._blocks(contents)),))
        self._worker.begin_step(step)
        pages = {page: np.frombuffer(self._caches.read(*page), np.uint8) for page in self._pages_of(contents)}
        for page, value in pages.items():
            self._caches.write(*page, ~value)
        self._memory.to_device()
        for layer in self._hooked():
            # Only now are the layer's pages computed: nothing may have been saved before.
            for page, value in pages.items():
                if content_name(page[0]) == content_name(layer):
                    self._caches.write(*page, value)
            self._memory.to_device()
            self._worker.save_layer(layer)
        for page, value in pages.items():
            self._caches.write(*page, value)
        self._memory.to_device()
        self._worker.end_step(step)
        assert self._worker.drain(300), "saves did not end"
        after = self._worker.counters.totals()
        names = ("save_blocks_stored", "save_blocks_present")
        return sum(after.get(name, 0) - before.get(name, 0) for name in names) // sum(
            map(len, self._announced.descriptors)
        )

    def counts(self) -> dict[str, int]:
        """What the worker has counted, by name."""
        return self._worker.counters.totals()

    def hits(self, contents: Sequence[str]) -> int:
        shards = ShardMap(self._topology, self.all_ranks())
        for count, content in enumerate(contents):
            keys = [key for group in range(shards.num_groups) for key in shards.keys(group, [block_hash(content)])]
            if any(status is not Status.OK for status in self._store.exist(keys)):
                return count
        return len(contents)

    def load(self, contents: Mapping[int, str]) -> set[int]:
        step = StepMetadata(loads=(LoadJob("request", self._blocks(contents)),))
        self._worker.begin_step(step)
        self._worker.start_loads(step)
        seen: dict[tuple[str, int, int], bytes] = {}
        for layer in self._hooked():
            pages = [page for page in self._pages_of(contents) if content_name(page[0]) == content_name(layer)]
            # An indexer of its own has no hook: it reads in front of its layer's.
            self._memory.from_device()
            seen |= {page: self._caches.read(*page) for page in pages if page[0] != layer}
            self._worker.wait_layer(layer)
            self._memory.from_device()
            seen |= {page: self._caches.read(*page) for page in pages if page[0] == layer}
        self._worker.end_step(step)
        self._memory.from_device()
        failed = self._worker.take_failed_blocks()
        early = [page for page, value in seen.items() if page[2] not in failed and value != self._caches.read(*page)]
        assert not early, f"layers were computed before these pages had landed: {early[:4]}"
        return {block_id // len(self._groups) for block_id in failed}

    def poison(self) -> None:
        self._caches.poison()
        self._memory.to_device()
        self._snapshot = self._caches.snapshot()

    def mismatches(self, contents: Mapping[int, str]) -> list[str]:
        self._memory.from_device()
        wrong = []
        for layer_name, index, block_id, content in self._contents(contents):
            expected = self._expected(layer_name, index, content)
            found = np.frombuffer(self._caches.read(layer_name, index, block_id), np.uint8)
            if not np.array_equal(found, expected):
                differs = np.flatnonzero(found != expected)
                component = self._caches.places[layer_name][index].component
                wrong.append(
                    f"{layer_name} {component.name}, block {block_id}: {len(differs)} of {len(expected)} "
                    f"bytes differ, the first at {differs[0]}"
                )
        return wrong

    def changed_outside(self, block_ids: Sequence[int]) -> list[str]:
        self._memory.from_device()
        ranges = [
            page
            for index, group in enumerate(self._groups)
            for page in self._caches.block_ranges([self._block(block_id, index) for block_id in block_ids], group)
        ]
        return [str(damage) for damage in self._snapshot.changed_outside(ranges)]

    def close(self) -> None:
        """Leave the pool."""
        self._worker.close()

    def _pages(self) -> Iterator[tuple[str, int]]:
        """Every byte once: what a layer registers a second time is the first one's, a second look another tensor's."""
        for entry in self._caches.spec.entries:
            if entry.same_as is None:
                for index, place in enumerate(self._caches.places[entry.layer_name]):
                    if not place.alias:
                        yield entry.layer_name, index

    def _hooked(self) -> list[str]:
        """The entries whose hooks the engine calls, in the order of computing."""
        return [entry.layer_name for entry in self._caches.spec.entries if ".indexer." not in entry.layer_name]

    def _pages_of(self, contents: Mapping[int, str]) -> list[tuple[str, int, int]]:
        """Layer name, tensor and block of every page that is written once."""
        return [(name, index, block_id) for name, index, block_id, _ in self._contents(contents)]

    def _contents(self, contents: Mapping[int, str]) -> Iterator[tuple[str, int, int, str]]:
        """Layer name, tensor, block and content of every page."""
        for name, index in self._pages():
            for block_id, content in contents.items():
                yield name, index, self._block(block_id, self._group_of[name]), content

    def _expected(self, layer_name: str, index: int, content: str) -> Bytes:
        return page_content(self._caches.places[layer_name][index], content_name(layer_name), content, self._part)

    def _block(self, block_id: int, group_index: int) -> int:
        """The block of a group that stands for a block of the suite's."""
        return block_id * len(self._groups) + group_index

    def _blocks(self, contents: Mapping[int, str]) -> tuple[GroupBlocks, ...]:
        hashes = tuple(block_hash(content) for content in contents.values())
        return tuple(
            GroupBlocks(index, tuple(self._block(block_id, index) for block_id in contents), hashes)
            for index in range(len(self._groups))
        )
