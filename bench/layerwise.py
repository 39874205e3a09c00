"""Layer by layer against whole-request transfer, side by side: time to first token, and to the last byte saved.

`python -m bench.layerwise [--point 61 16 180224] [--place remote] [--write]`

Real Mooncake over TCP on loopback. Remote: a process of its own owns the memory; local: this one does. Blocks have one
page a layer; `bench.layered_models` has the caches of whole models. A layer's computing is a sleep, none or as long as
the layer's part of a packed load takes, so that a core is free for the transfer as it is beside an NPU. The ways of
transfer take turns within every repetition, and medians count. `--write` puts all points into `bench/layerwise.json`
and their table into `docs/layerwise.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.host import HostDevice
from kvpool_connector.metadata import GroupBlocks, LoadJob, SaveJob, StepMetadata
from kvpool_connector.registration import GroupSpec
from kvpool_connector.worker import PoolWorker
from tests.targets.borrowed import Borrowed
from tests.targets.real_mooncake import RealMaster, make_store

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "layerwise.json"
PAGE = ROOT / "docs" / "layerwise.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"

WAYS: dict[str, dict[str, Any]] = {
    "direct": {"transfer": "direct"},
    "packed": {"transfer": "packed"},
    "layers": {"transfer": "packed", "use_layerwise": True},
    "each": {"transfer": "packed", "use_layerwise": True, "layerwise_layers_per_transfer": 1},
}
"""`layers` are moved together as the connector chooses, `each` one by one."""
PLACES = ("remote", "local")
COMPUTING = ("none", "equal")
NUM_LAYERS = (1, 8, 61)
NUM_BLOCKS = (1, 8, 16, 128, 1024)
PAGE_BYTES = (256, 4096, 32768, 131072)
MAX_BYTES = 65 << 20
MAX_PIECES = {"direct": 1000, "each": 500}
"""More pieces than these are not moved one by one: it takes seconds, or fails."""
SEGMENT_BYTES = 2 << 30
MIN_REPEATS, MAX_REPEATS, POINT_S = 4, 15, 1.2
BLOCK_TOKENS = 16


def points() -> list[tuple[int, int, int]]:
    """Layers, blocks and bytes of a page, as far as they fit."""
    return [(n, b, p) for p in PAGE_BYTES for n in NUM_LAYERS for b in NUM_BLOCKS if n * b * p <= MAX_BYTES]


class OneCache(Borrowed):
    """Registers what several workers share once."""

    def register(self, address: int, num_bytes: int) -> Status:
        return Status.OK if address in self._registered else super().register(address, num_bytes)


class Bench:
    """One rank by every way of transfer."""

    step_s = 0.0
    """How long the step of the last save or load took, from its start to where the engine goes on."""

    def __init__(
        self,
        store: Any,
        num_layers: int,
        pages: Sequence[int],
        num_blocks: int,
        ways: Mapping[str, dict[str, Any]] = WAYS,
    ) -> None:
        """`pages`: bytes of a layer's components. `ways`: settings by a name; each has a namespace of its own."""
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(num_layers)]
        self.num_blocks = num_blocks
        sizes = [page // BLOCK_TOKENS for page in pages]
        self.caches = {
            name: tuple(torch.ones(num_blocks, BLOCK_TOKENS, 1, size, dtype=torch.int8) for size in sizes)
            for name in self.names
        }
        spec = GroupSpec(tuple(self.names), BLOCK_TOKENS, num_blocks, kind="latent")
        self.workers: dict[str, PoolWorker] = {}
        lent = OneCache(store)
        for way, settings in ways.items():
            namespace = f"{way}-{uuid.uuid4().hex[:8]}"
            options = {"load_timeout_s": 120, "namespace": namespace, **settings}
            worker = PoolWorker(
                PoolSettings.model_validate(options),
                lent,
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
        self.step_s = time.perf_counter() - start
        assert worker.drain(120)
        took = time.perf_counter() - start
        counts = worker.counters.take()
        assert counts.get("save_blocks_stored") == self.num_blocks, f"not all was stored: {counts}"
        return took

    def load(self, way: str, turn: int, layer_s: float) -> float:
        """Seconds from the start of the step until its last layer is computed."""
        worker, step = self.workers[way], StepMetadata(loads=(LoadJob("r", self.blocks(turn)),))
        start = time.perf_counter()
        worker.begin_step(step)
        worker.start_loads(step)
        for name in self.names:
            worker.wait_layer(name)
            _compute(layer_s)
        worker.end_step(step)
        self.step_s = took = time.perf_counter() - start
        assert not worker.take_failed_blocks(), "not all was loaded"
        worker.counters.take()
        return took

    def forget(self, store: Any, turn: int) -> None:
        """Take a turn's objects out of the pool."""
        for worker in self.workers.values():
            shard = worker._part.shards[0]
            store.remove([shard.key(block_hash) for block_hash in self.blocks(turn)[0].block_hashes], force=True)

    def close(self) -> None:
        """End the ranks; the store stays."""
        for worker in self.workers.values():
            worker.close()


def _compute(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def measure(store: Any, place: str, num_layers: int, num_blocks: int, page_bytes: int) -> dict[str, Any]:
    """Milliseconds at one point: medians, and the least times, which other load on the machine disturbs less."""
    num_pieces = num_layers * num_blocks
    offered = {way: settings for way, settings in WAYS.items() if num_pieces <= MAX_PIECES.get(way, num_pieces)}
    bench = Bench(store, num_layers, [page_bytes], num_blocks, offered)
    ways = list(offered)
    for turn in (-2, -1):
        for way in ways:  # warms memory, staging and connections
            bench.save(way, turn, 0.0)
            bench.load(way, turn, 0.0)
    transfer_s = min(bench.load("packed", -1, 0.0) for _ in range(3))
    bench.forget(store, -2)
    bench.forget(store, -1)
    layer_s = {"none": 0.0, "equal": transfer_s / num_layers}
    times: dict[tuple[str, str, str], list[float]] = {}
    begun = time.perf_counter()
    for turn in range(MAX_REPEATS * len(COMPUTING)):
        if turn >= MIN_REPEATS * len(COMPUTING) and time.perf_counter() - begun > POINT_S:
            break
        computing = COMPUTING[turn % len(COMPUTING)]
        order = ways[turn // 2 % len(ways) :] + ways[: turn // 2 % len(ways)]
        for what, move in (("save", bench.save), ("load", bench.load)):
            for way in order:
                times.setdefault((what, computing, way), []).append(move(way, turn, layer_s[computing]))
        bench.forget(store, turn)
    bench.close()
    result: dict[str, Any] = {
        "place": place,
        "layers": num_layers,
        "blocks": num_blocks,
        "page_bytes": page_bytes,
        "layer_ms": round(layer_s["equal"] * 1e3, 4),
    }
    for (what, computing, way), taken in times.items():
        in_ms = {"median": round(statistics.median(taken) * 1e3, 3), "least": round(min(taken) * 1e3, 3)}
        result.setdefault(what, {}).setdefault(computing, {})[way] = in_ms
    return result


@contextmanager
def pool(place: str) -> Iterator[Any]:
    """A client of a fresh master, with the memory in another process or in this one."""
    master = RealMaster(SEGMENT_BYTES, 10)
    try:
        master.start()
        if place == "remote":
            master.start_owner()
        store = make_store(master.address, SEGMENT_BYTES if place == "local" else 0)
        yield store
        store.close()
    finally:
        master.close()


def table(measured: Sequence[dict[str, Any]]) -> str:
    """The measured points as a table: milliseconds of packed transfer, and layer by layer as a part of it."""
    lines = [
        "| memory | layers x blocks x page | load, ms | no computing | equal | save, ms | no computing | equal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in measured:
        cells = [one["place"], f"{one['layers']} x {one['blocks']} x {one['page_bytes']:,} B"]
        for what in ("load", "save"):
            medians = {c: {way: time["median"] for way, time in one[what][c].items()} for c in COMPUTING}
            cells.append(f"{medians['none']['packed']:.1f}")
            cells += [f"{medians[c]['layers'] / medians[c]['packed']:.2f}" for c in COMPUTING]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str, measured: Sequence[dict[str, Any]]) -> str:
    """The page with the table of these points."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + "\n" + table(measured) + "\n" + END + rest.split(END)[1]


def main() -> None:
    """Print one line of JSON a point."""
    parser = argparse.ArgumentParser(prog="python -m bench.layerwise")
    parser.add_argument("--point", type=int, nargs=3, action="append", help="layers, blocks and bytes of a page")
    parser.add_argument("--place", choices=PLACES, action="append")
    parser.add_argument("--write", action="store_true", help="keep the results")
    asked = parser.parse_args()
    measured = []
    for place in asked.place or PLACES:
        with pool(place) as store:
            for point in asked.point or points():
                measured.append(measure(store, place, *point))
                print(json.dumps(measured[-1]), flush=True)
    if asked.write:
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, measured)) + "\n]\n", encoding="utf-8")
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main()
