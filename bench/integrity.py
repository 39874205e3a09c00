"""What checksums cost: time of loads with `integrity` off, sampled and on, side by side.

`python -m bench.integrity [--blocks 16] [--layers 61] [--pages 131072 16384 32768] [--rounds 48]
[--staging 256MB]`

Real Mooncake over TCP in two processes: a master, an owner of the memory, and this one. The blocks are those of one
rank of DeepSeek-V3.2 unless told otherwise, the staging area has its default size. In each round every mode loads the
same blocks once, in another order each time. The cost is the median over rounds of the ratio of a mode's time to that
of `off` in the same round; `off` stands twice in every round, so that the ratio of `off again`, which should be 1, says
how far the others can be trusted. One line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.layerwise import Bench
from kvpool_connector.config import PoolSettings, parse_size
from tests.targets.real_mooncake import make_store, real_master

MODES = {"off": "off", "off again": "off", "sampled": "sampled", "on": "on"}
TARGETS = {"sampled": 1.02, "on": 1.10}
RESAMPLES = 2000
DEFAULT_STAGING = PoolSettings().staging_bytes


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where the median of such ratios lies in 95 of 100 resamples."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def compared(bench: Bench) -> float:
    """Milliseconds that the checksums of all blocks of a load take by themselves, here and now."""
    worker = bench.workers["on"]
    transfer = worker._loads()._transfers[0]
    integrity, count = transfer._integrity, transfer._per_chunk
    times = []
    with transfer._staging.chunk(1) as chunk:
        for _ in range(9):
            start = time.perf_counter()
            integrity.seal(chunk, count, chunk + transfer._object_bytes)
            times.append((time.perf_counter() - start) / count)
    return statistics.median(times) * bench.num_blocks * 1e3


def measure(
    store: Any, num_layers: int, pages: Sequence[int], num_blocks: int, rounds: int, staging_bytes: int
) -> dict[str, Any]:
    """Medians in milliseconds, ratios to `off` with their intervals."""
    ways = {
        mode: {"transfer": "packed", "integrity": integrity, "staging_bytes": staging_bytes}
        for mode, integrity in MODES.items()
    }
    bench = Bench(store, num_layers, pages, num_blocks, ways)
    for mode in ways:
        bench.save(mode, 0, 0.0)
        bench.load(mode, 0, 0.0)  # warms memory, staging and connections
    times: dict[str, list[float]] = {mode: [] for mode in ways}
    orders = itertools.cycle(itertools.permutations(ways))
    for order in itertools.islice(orders, rounds):
        for mode in order:
            times[mode].append(bench.load(mode, 0, 0.0))
    megabytes = num_layers * sum(pages) * num_blocks / 1e6
    result: dict[str, Any] = {
        "layers": num_layers,
        "pages": list(pages),
        "blocks": num_blocks,
        "megabytes": round(megabytes, 1),
        "blocks_a_chunk": bench.workers["on"]._loads()._transfers[0]._per_chunk,
        "rounds": rounds,
        "ms": {mode: round(statistics.median(taken) * 1e3, 1) for mode, taken in times.items()},
        "checksums_alone_ms": round(compared(bench), 1),
        "of_off": {},
    }
    for mode in ("off again", "sampled", "on"):
        ratios = [ours / off for ours, off in zip(times[mode], times["off"], strict=True)]
        low, high = interval(ratios)
        result["of_off"][mode] = {
            "median": round(statistics.median(ratios), 3),
            "from": round(low, 3),
            "to": round(high, 3),
        }
    result["within_target"] = {mode: result["of_off"][mode]["median"] <= most for mode, most in TARGETS.items()}
    return result


def main() -> None:
    """Print one line of JSON a size."""
    parser = argparse.ArgumentParser(prog="python -m bench.integrity")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--pages", type=int, nargs="+", default=[131072, 16384, 32768], help="bytes a component")
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--staging", type=parse_size, default=DEFAULT_STAGING, help="size of the staging area")
    asked = parser.parse_args()
    with real_master(4 << 30, lease_s=10) as master:
        for blocks in asked.blocks:
            store = make_store(master.address, 0)
            found = measure(store, asked.layers, asked.pages, blocks, asked.rounds, asked.staging)
            print(json.dumps(found), flush=True)
            store.close()


if __name__ == "__main__":
    main()
