"""A range that is written after the release time-out lands in somebody else's object; the connector writes none."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch

from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.contract.clock import MonotonicClock
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.host import HostDevice
from kvpool_connector.metadata import GroupBlocks, SaveJob, StepMetadata
from kvpool_connector.mooncake import MooncakeStore
from kvpool_connector.registration import GroupSpec
from kvpool_connector.worker import PoolWorker
from tests.twin.world import DISCARD_S, RELEASE_S, SEGMENT_BYTES, Memory, SimulatedWorld, World, get, put

MIB = 1 << 20
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")
NUM_BLOCKS = 8
NEIGHBOURS = 27
"""With the abandoned objects more than the segment holds: some must lie where those lay."""


def worker_of(world: World, limit_s: float) -> tuple[PoolWorker, dict[str, torch.Tensor]]:
    """A rank whose blocks are 2 MiB in two layers."""
    settings = {"use_layerwise": True, "layerwise_layers_per_transfer": 1, "layerwise_session_limit_s": limit_s}
    pool = PoolSettings.model_validate({**settings, "staging_bytes": 64 * MIB})
    settings_of_store = StoreSettings(
        master_server_address="127.0.0.1:1",
        local_hostname="127.0.0.1",
        protocol="tcp",
        global_segment_size=0,
        local_buffer_size=16 * MIB,
    ).model_copy(update={"master_server_address": world.address})
    store = MooncakeStore(settings_of_store, pool, module=world.module)
    store.connect()
    clock = world.master.clock if isinstance(world, SimulatedWorld) else MonotonicClock()
    worker = PoolWorker(pool, store, HostDevice(), Topology(1), Rank(), ModelIdentity("tiny"), clock)
    caches = {name: torch.full((NUM_BLOCKS, 16, 1, 32768), 7.0, dtype=torch.bfloat16) for name in LAYERS}
    worker.register(caches, [GroupSpec(LAYERS, 16, NUM_BLOCKS)])
    return worker, caches


def damaged_neighbours(world: World, limit_s: float) -> int:
    """A step that hangs between its layers for longer than the release time-out; objects that it damaged."""
    world.client(SEGMENT_BYTES)
    other: Any = world.client()
    worker, _ = worker_of(world, limit_s)
    hashes = tuple(hashlib.sha256(b"%d" % i).digest() for i in range(NUM_BLOCKS))
    step = StepMetadata(saves=(SaveJob("r", (GroupBlocks(0, tuple(range(NUM_BLOCKS)), hashes),)),))
    worker.begin_step(step)
    worker.save_layer(LAYERS[0])
    save = worker._layer_save
    assert save is not None
    waiting = Memory(1)
    give_up = time.monotonic() + 30
    while save.tasks > 1:
        assert time.monotonic() < give_up, "the first layer never came in"
        time.sleep(0.001)
    assert all(one.left == 1 for one in save.groups[0].objects), "the first layer is in"
    world.advance(DISCARD_S + 1.2)
    shard = worker._shards[0]
    assert shard is not None
    for block_hash in hashes:
        assert put(other, shard.key(block_hash), waiting.value) == 0
    world.advance(2 * RELEASE_S + 3)
    values = {world.key(): bytes([i + 1]) * (2 * MIB) for i in range(NEIGHBOURS)}
    stored = {key: value for key, value in values.items() if put(other, key, value) == 0}
    worker.save_layer(LAYERS[1])
    worker.end_step(step)
    assert worker.drain(60)
    damaged = 0
    for key, value in stored.items():
        code, found = get(other, key, 2 * MIB)
        damaged += code == 2 * MIB and found != value
    assert "save_blocks_stored" not in worker.counters.totals()
    worker.close()
    return damaged


def test_without_the_limit_neighbours_are_damaged(fresh_world: World) -> None:
    assert damaged_neighbours(fresh_world, 600.0) > 0


def test_nothing_is_written_after_the_limit(fresh_world: World) -> None:
    assert damaged_neighbours(fresh_world, DISCARD_S / 2) == 0
