"""Plans: keys, addresses and sizes of a request's blocks, as the store's Python call wants them."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.measure import Row, pairs, seconds, spread
from kvpool_connector.contract.descriptor import ComponentContent, Descriptor, LayerContent, ModelIdentity
from kvpool_connector.contract.layout import Component, Layer, ShardLayout
from kvpool_connector.contract.shards import RankShards, Shard, ShardMap
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.topology import Topology
from kvpool_connector.planner import Planner
from kvpool_connector.scheduler import PoolScheduler, ScheduledRequest
from kvpool_connector.tracker import GroupRule, RequestView

BLOCK_SIZE = 128
V32_PAGES = (131072, 16384, 32768)
"""Bytes of a block of 128 tokens in `k_nope`, `k_pe` and `dsa_k`, two bytes an element."""
V32_LAYERS = 62
"""With the MTP layer, so that a block has 186 pieces."""
NUM_BLOCKS = 12_000
REQUEST_BLOCKS = 1024
LONG_BLOCKS = 1_000_000 // BLOCK_SIZE
CHUNK_TOKENS = 8192


def v32_layout(num_blocks: int = NUM_BLOCKS) -> ShardLayout:
    """DeepSeek-V3.2 at addresses as a device has them; nothing lies there."""
    layers, address = [], 0x12C0_0000_0000
    for layer in range(V32_LAYERS):
        components = []
        for name, page in zip(("k_nope", "k_pe", "dsa_k"), V32_PAGES, strict=True):
            components.append(
                Component(name, "bfloat16", (BLOCK_SIZE, 1, page // 2 // BLOCK_SIZE), "NHD", address, page, page)
            )
            address += page * num_blocks
        layers.append(Layer(str(layer), (f"layers.{layer}",), tuple(components)))
    return ShardLayout(0, BLOCK_SIZE, num_blocks, tuple(layers))


def hashes_of(count: int) -> list[bytes]:
    """As many block hashes, of 32 bytes as vLLM's."""
    return [hashlib.sha256(i.to_bytes(8, "big")).digest() for i in range(count)]


Plan = tuple[list[str], Sequence[Sequence[int]], list[list[int]]]


def plain_loop(layout: ShardLayout, scope: str, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Plan:
    """What anyone would write first."""
    parts = [(c.base_address, c.block_stride, c.page_bytes) for c in layout.components]
    keys, addresses, sizes = [], [], []
    for block_hash, block_id in zip(hashes, block_ids, strict=True):
        keys.append(f"{scope}/{block_hash.hex()}")
        block_addresses, block_sizes = [], []
        for base, stride, size in parts:
            block_addresses.append(base + block_id * stride)
            block_sizes.append(size)
        addresses.append(block_addresses)
        sizes.append(block_sizes)
    return keys, addresses, sizes


def connectors(planner: Planner, shard: Shard, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Plan:
    """As `PoolWorker` and `DirectTransfer` make it."""
    keys = shard.keys(hashes, "")
    return keys, planner.addresses(block_ids), [planner.sizes] * len(keys)


def plans(repeats: int) -> list[Row]:
    """A request of 131,072 tokens: blocks seen before, and blocks at first sight."""
    layout, shard = v32_layout(), Shard("default", 0, "0" * 32)
    scope = shard.key(b"\0").rpartition("/")[0]
    hashes, block_ids = hashes_of(REQUEST_BLOCKS), list(range(7, 7 + REQUEST_BLOCKS))
    theirs = plain_loop(layout, scope, hashes, block_ids)
    ours = connectors(Planner(layout), shard, hashes, block_ids)
    if (ours[0], [list(row) for row in ours[1]], ours[2]) != theirs:
        raise AssertionError("the two ways make different plans")
    del theirs, ours
    fresh: list[Planner] = []
    seen = Planner(layout)
    rows = []
    for what, at_least, planner, before in (
        ("blocks seen before", 20.0, lambda: seen, None),
        ("blocks at first sight", 2.0, lambda: fresh[-1], lambda: fresh.__setitem__(slice(None), [Planner(layout)])),
    ):
        taken = pairs(
            lambda: plain_loop(layout, scope, hashes, block_ids),
            lambda planner=planner: connectors(planner(), shard, hashes, block_ids),
            repeats,
            before_other=before,
            clock=time.thread_time,
        )
        rows.append(
            Row(
                "Planning",
                f"plan of {REQUEST_BLOCKS:,} blocks x {layout.num_pieces} buffers, {what}: times faster",
                "a plain Python loop",
                **spread(plain / ours for plain, ours in taken),
                at_least=at_least,
            )
        )
    return rows


class Missing:
    """A lookup of an empty pool."""

    def exist(self, keys: Sequence[str]) -> list[Status]:
        """Nothing is there."""
        return [Status.MISS] * len(keys)

    def close(self) -> None:
        """Nothing to give back."""


def shard_map(topology: Topology) -> ShardMap:
    """The shards of a model whose ranks differ in heads and stages alone."""
    announced = []
    for rank in topology.ranks():
        heads = topology.heads(rank)
        content = ComponentContent("kv", "bfloat16", (BLOCK_SIZE, heads.count, 128), "NHD")
        layer = LayerContent(str(rank.pp), (content,))
        descriptor = Descriptor(ModelIdentity("bench"), 0, BLOCK_SIZE, heads, topology.context(rank), (layer,))
        announced.append(RankShards(rank, "bench", 0, (topology.writer(rank),), ((descriptor,),)))
    return ShardMap(topology, announced)


def long_prefill() -> float:
    """A 1,000,000-token prefill in chunks, the scheduler's step and the worker's plan: last ten against first ten."""
    planner, shard, hashes = Planner(v32_layout()), Shard("default", 0, "0" * 32), hashes_of(LONG_BLOCKS)
    scheduler = PoolScheduler([GroupRule(BLOCK_SIZE)], BLOCK_SIZE, Missing())
    scheduler.set_shards(shard_map(Topology(1)))
    num_tokens = LONG_BLOCKS * BLOCK_SIZE
    view = RequestView("long", num_tokens, num_tokens, hashes)
    scheduler.num_matched_tokens(view, 0)
    scheduler.allocated(view, [[]], 0)

    def chunk(start: int) -> None:
        blocks = list(range(start // BLOCK_SIZE, (start + CHUNK_TOKENS) // BLOCK_SIZE))
        step = scheduler.build_step([ScheduledRequest("long", [blocks], False, start, CHUNK_TOKENS)])
        for job in step.saves:
            connectors(planner, shard, job.blocks[0].block_hashes, job.blocks[0].block_ids)

    taken = [
        seconds(lambda start=start: chunk(start), time.thread_time)
        for start in range(0, num_tokens // CHUNK_TOKENS * CHUNK_TOKENS, CHUNK_TOKENS)
    ]
    return statistics.median(taken[-10:]) / statistics.median(taken[:10])


def chunks(repeats: int) -> list[Row]:
    """The last ten chunks against the first ten."""
    # Each in a process of its own: memory that an earlier one gave back is cheaper, and only the first chunks get it.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        ratios = [processes.submit(long_prefill).result() for _ in range(repeats)]
    return [
        Row(
            "Planning",
            "the last ten of 122 chunks of a 1,000,000-token prefill, step and plan: cost of a chunk",
            "the first ten",
            **spread(ratios),
            at_most=1.2,
        )
    ]


def rows(short: bool) -> list[Row]:
    """This part of the table."""
    return [*plans(9 if short else 41), *chunks(3 if short else 9)]
