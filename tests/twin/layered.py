"""A rank that moves layer by layer, in a world."""

from __future__ import annotations

import hashlib
import time

import torch

from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.contract.clock import MonotonicClock
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.host import HostDevice
from kvpool_connector.metadata import GroupBlocks, LoadJob, SaveJob, StepMetadata
from kvpool_connector.mooncake import MooncakeStore
from kvpool_connector.registration import GroupSpec
from kvpool_connector.worker import PoolWorker
from tests.twin.world import SimulatedWorld, World

MIB = 1 << 20
NUM_BLOCKS = 8


class LayeredRank:
    """`NUM_BLOCKS` blocks, each of 1 MiB a layer, with hooks called one by one."""

    def __init__(self, world: World, num_layers: int, **settings: object) -> None:
        pool = PoolSettings.model_validate(
            {"use_layerwise": True, "layerwise_layers_per_transfer": 1, "staging_bytes": 64 * MIB, **settings}
        )
        settings_of_store = StoreSettings(
            master_server_address="127.0.0.1:1",
            local_hostname="127.0.0.1",
            protocol="tcp",
            global_segment_size=0,
            local_buffer_size=16 * MIB,
        ).model_copy(update={"master_server_address": world.address})
        self.store = MooncakeStore(settings_of_store, pool, module=world.module)
        self.store.connect()
        self.layers = tuple(f"model.layers.{i}.attn" for i in range(num_layers))
        clock = world.master.clock if isinstance(world, SimulatedWorld) else MonotonicClock()
        self.worker = PoolWorker(pool, self.store, HostDevice(), Topology(1), Rank(), ModelIdentity("tiny"), clock)
        self.caches = {name: torch.zeros((NUM_BLOCKS, MIB // 32, 1, 16), dtype=torch.bfloat16) for name in self.layers}
        self.worker.register(self.caches, [GroupSpec(self.layers, MIB // 32, NUM_BLOCKS)])

    def fill(self, value: float) -> None:
        """Every layer of every block gets numbers of its own."""
        for i, cache in enumerate(self.caches.values()):
            for block_id in range(NUM_BLOCKS):
                cache[block_id] = value + 16 * i + block_id

    def values(self) -> dict[int, list[float]]:
        """By block, each layer's number, which all of the layer must have."""
        found: dict[int, list[float]] = {}
        for block_id in range(NUM_BLOCKS):
            pages = [cache[block_id] for cache in self.caches.values()]
            assert all(bool((page == page.flatten()[0]).all()) for page in pages), "a page holds more than one number"
            found[block_id] = [float(page.flatten()[0]) for page in pages]
        return found

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """What the engine would call the blocks' hashes."""
        return tuple(hashlib.sha256(b"%d" % i).digest() for i in range(NUM_BLOCKS))

    @property
    def keys(self) -> list[str]:
        """What the blocks' objects are called."""
        shard = self.worker._part.shards[0]
        return [shard.key(block_hash) for block_hash in self.hashes]

    def begin_save(self) -> StepMetadata:
        """The start of a step that completes all blocks."""
        step = StepMetadata(saves=(SaveJob("r", (GroupBlocks(0, tuple(range(NUM_BLOCKS)), self.hashes),)),))
        self.worker.begin_step(step)
        return step

    def await_ranges(self, left: int) -> None:
        """Until of every block of this step's save `left` ranges are missing."""
        save = self.worker._layer_save
        assert save is not None
        give_up = time.monotonic() + 30
        while save.tasks > 1:
            assert time.monotonic() < give_up, "the layers never came in"
            time.sleep(0.001)
        assert all(one.left == left for one in save.shards[0].objects), "a layer is missing"

    def save(self) -> None:
        """A whole step, saved to its end."""
        step = self.begin_save()
        for layer in self.layers:
            self.worker.save_layer(layer)
        self.end_save(step)

    def end_save(self, step: StepMetadata) -> None:
        """A step's end, and its saves'."""
        self.worker.end_step(step)
        assert self.worker.drain(60)

    def begin_load(self) -> StepMetadata:
        """The start of a step that loads all blocks."""
        step = StepMetadata(loads=(LoadJob("r", (GroupBlocks(0, tuple(range(NUM_BLOCKS)), self.hashes),)),))
        self.worker.begin_step(step)
        self.worker.start_loads(step)
        return step

    def counts(self) -> dict[str, int]:
        """What the rank has counted of blocks saved."""
        return {name: n for name, n in self.worker.counters.totals().items() if name.startswith("save_blocks")}
