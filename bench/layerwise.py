"""Layer by layer against whole-request transfer: time to first token and to the last byte saved, side by side.

`python -m bench.layerwise [--blocks 8 16] [--layers 61] [--pages 131072 16384 32768] [--repeats 5]`

Real Mooncake over TCP in two processes: a master, an owner of the memory, and this one. A layer's computing is a sleep
of as long as the layer's transfer takes, so that a core is free for the transfer as it is beside an NPU. The ways of
transfer take turns within every repetition; medians and their ratios are printed as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.host import HostDevice
from kvpool_connector.metadata import GroupBlocks, LoadJob, SaveJob, StepMetadata
from kvpool_connector.registration import GroupSpec
from kvpool_connector.worker import PoolWorker
from tests.targets.borrowed import Borrowed
from tests.targets.real_mooncake import make_store, real_master

WAYS: dict[str, dict[str, Any]] = {
    "direct": {"transfer": "direct"},
    "packed": {"transfer": "packed"},
    "layerwise": {"transfer": "packed", "use_layerwise": True},
}
BLOCK_TOKENS = 16


class Bench:
    """One rank with caches of given pages, by every way of transfer."""

    def __init__(
        self,
        store: Any,
        num_layers: int,
        pages: Sequence[int],
        num_blocks: int,
        ways: Mapping[str, dict[str, Any]] = WAYS,
    ) -> None:
        """`ways`: settings by a name; each has a namespace, and so objects, of its own."""
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(num_layers)]
        self.num_blocks = num_blocks
        elements = [page // BLOCK_TOKENS for page in pages]
        self.caches = {
            name: tuple(torch.zeros(num_blocks, BLOCK_TOKENS, 1, size, dtype=torch.int8) for size in elements)
            for name in self.names
        }
        spec = GroupSpec(tuple(self.names), BLOCK_TOKENS, num_blocks, kind="latent")
        self.workers: dict[str, PoolWorker] = {}
        for way, settings in ways.items():
            namespace = f"{way}-{uuid.uuid4().hex[:8]}"
            options = {"staging_bytes": 512 << 20, "load_timeout_s": 120, "namespace": namespace, **settings}
            worker = PoolWorker(
                PoolSettings.model_validate(options),
                Borrowed(store),
                HostDevice(),
                Topology(1),
                Rank(),
                ModelIdentity("m"),
            )
            worker.register(self.caches, [spec])
            self.workers[way] = worker

    def blocks(self, turn: int) -> tuple[GroupBlocks, ...]:
        """New content for every turn, and for every way by its namespace."""
        hashes = tuple(hashlib.sha256(b"%d/%d" % (turn, i)).digest() for i in range(self.num_blocks))
        return (GroupBlocks(0, tuple(range(self.num_blocks)), hashes),)

    def save(self, way: str, turn: int, layer_s: float) -> float:
        """Seconds from the start of computing until all is in the pool."""
        worker, step = self.workers[way], StepMetadata(saves=(SaveJob("r", self.blocks(turn)),))
        start = time.perf_counter()
        worker.begin_step(step)
        for name in self.names:
            _compute(layer_s)
            worker.save_layer(name)
        worker.end_step(step)
        assert worker.drain(120)
        took = time.perf_counter() - start
        assert worker.counters.take().get("save_blocks_stored") == self.num_blocks, "not all was stored"
        return took

    def load(self, way: str, turn: int, layer_s: float) -> float:
        """Seconds from the start of the step until its last layer is computed."""
        worker, step = self.workers[way], StepMetadata(loads=(LoadJob("r", self.blocks(turn)),))
        worker.begin_step(step)
        start = time.perf_counter()
        worker.start_loads(step)
        for name in self.names:
            worker.wait_layer(name)
            _compute(layer_s)
        worker.end_step(step)
        took = time.perf_counter() - start
        assert not worker.take_failed_blocks(), "not all was loaded"
        worker.counters.take()
        return took


def _compute(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def measure(store: Any, num_layers: int, pages: Sequence[int], num_blocks: int, repeats: int, computing: str) -> dict:
    """Medians in seconds for one size. `computing`: `equal` to the transfer of a layer, or `none`."""
    bench = Bench(store, num_layers, pages, num_blocks)
    turn = 0
    for way in WAYS:
        bench.save(way, turn, 0.0)  # warms memory, staging and connections
    transfer_s = min(bench.load("packed", turn, 0.0) for _ in range(3))
    layer_s = transfer_s / num_layers if computing == "equal" else 0.0
    times: dict[str, dict[str, list[float]]] = {"load": {w: [] for w in WAYS}, "save": {w: [] for w in WAYS}}
    for _ in range(repeats):
        turn += 1
        for way in WAYS:
            times["save"][way].append(bench.save(way, turn, layer_s))
        for way in WAYS:
            times["load"][way].append(bench.load(way, turn, layer_s))
        with_keys = list(bench.workers.values())
        for worker in with_keys:
            shard = worker._shards[0]
            assert shard is not None
            store.remove([shard.key(h) for h in bench.blocks(turn)[0].block_hashes], force=True)
    result: dict[str, Any] = {
        "layers": num_layers,
        "pages": list(pages),
        "blocks": num_blocks,
        "megabytes": round(num_layers * sum(pages) * num_blocks / 1e6, 1),
        "layer_ms": round(layer_s * 1e3, 3),
    }
    for what, by_way in times.items():
        medians = {way: statistics.median(taken) for way, taken in by_way.items()}
        result[what] = {
            "ms": {way: round(median * 1e3, 1) for way, median in medians.items()},
            "of_direct": round(medians["layerwise"] / medians["direct"], 2),
            "of_packed": round(medians["layerwise"] / medians["packed"], 2),
        }
    return result


def main() -> None:
    """Print one line of JSON a size."""
    parser = argparse.ArgumentParser(prog="python -m bench.layerwise")
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--layers", type=int, nargs="+", default=[61])
    parser.add_argument("--pages", type=int, nargs="+", default=[131072, 16384, 32768], help="bytes a component")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--computing", choices=("equal", "none"), default="equal")
    asked = parser.parse_args()
    with ExitStack() as stack:
        master = stack.enter_context(real_master(2 << 30, lease_s=10))
        for layers in asked.layers:
            for blocks in asked.blocks:
                store = make_store(master.address, 0)
                print(
                    json.dumps(measure(store, layers, asked.pages, blocks, asked.repeats, asked.computing)), flush=True
                )
                store.close()


if __name__ == "__main__":
    main()
