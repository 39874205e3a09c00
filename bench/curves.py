"""`python -m bench.curves`: what the pictures of `docs/performance.md` show, into `docs/performance-curves.json`.

Unlike the table's ratios these are times and bandwidths of one machine, so that their course can be seen. Where vLLM is
there, the time to first token is measured; elsewhere planning and transfers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

DATA = Path(__file__).parents[1] / "docs" / "performance-curves.json"

Point = tuple[float, float, float, float]
"""Where; the median of what was measured there; and its quartiles."""
Panels = dict[str, dict[str, list[Point]]]
"""By a panel's title, curves by their name."""

PLAN_TOKENS = (8_192, 32_768, 131_072, 1_000_000)
PAGE_KIB = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)
PROMPT_TOKENS = (300, 1000, 3000)


def point(where: float, taken: Iterable[float]) -> Point:
    """The median and the quartiles, to four digits."""
    low, median, high = (float(f"{value:.4g}") for value in statistics.quantiles(taken, n=4, method="inclusive"))
    return where, median, low, high


def planning(repeats: int = 21) -> Panels:
    """Milliseconds of the processor for the plan of a request of DeepSeek-V3.2, by its tokens."""
    from bench.measure import seconds
    from bench.planning import BLOCK_SIZE, connectors, hashes_of, plain_loop, v32_layout
    from kvpool_connector.contract.shards import Shard
    from kvpool_connector.planner import Planner

    layout, shard = v32_layout(), Shard("default", 0, "0" * 32)
    seen = Planner(layout)
    curves: dict[str, list[Point]] = {}
    for tokens in PLAN_TOKENS:
        hashes, ids = hashes_of(tokens // BLOCK_SIZE), range(tokens // BLOCK_SIZE)
        taken: dict[str, list[float]] = {}
        connectors(seen, shard, hashes, ids)
        for _ in range(repeats):
            fresh = Planner(layout)
            acts: dict[str, Callable[[], object]] = {
                "a plain Python loop": partial(plain_loop, layout, "default/0", hashes, ids),
                "blocks at first sight": partial(connectors, fresh, shard, hashes, ids),
                "blocks seen before": partial(connectors, seen, shard, hashes, ids),
            }
            for name, act in acts.items():
                taken.setdefault(name, []).append(1e3 * seconds(act, time.thread_time))
        for name, found in taken.items():
            curves.setdefault(name, []).append(point(tokens, found))
    return {"": curves}


def bandwidth(repeats: int = 7) -> Panels:
    """MB/s of 8 blocks of 61 layers with two buffers each over TCP, by KiB of a buffer."""
    from bench.layerwise import pool
    from bench.transfers import Shape, measure

    names = {"raw": "the raw multi-buffer call", "direct": "direct transfer", "packed": "packed transfer"}
    panels: Panels = {"save": {}, "load": {}}
    with pool("remote") as store:
        for kib in PAGE_KIB:
            shape = Shape(f"{kib} KiB", (int(kib * 1024),) * 2)
            moved_mb = 8 * shape.num_layers * sum(shape.pages) / 1e6
            for what, by_way in measure(store, shape, 8, repeats).items():
                for way, name in names.items():
                    found = point(kib, [moved_mb / taken for taken in by_way[way]])
                    panels[what].setdefault(name, []).append(found)
    return panels


def first_token(repeats: int = 5) -> Panels:
    """Milliseconds to the first token in the real engine, by the tokens of a prompt: computed, and all in the pool."""
    from random import Random

    from bench.engine import engines, prompts

    # Tiny models gain nothing from more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    random = Random(13)
    computed, within, between = "computed, no pool", "in the pool, loaded in the step", "in the pool, `load_async`"
    pools = {computed: None, within: {"namespace": "within"}, between: {"namespace": "between", "load_async": True}}
    taken: dict[tuple[str, int], list[float]] = {}
    with engines((4, 384), **pools) as running:
        for turn in range(repeats + 1):
            for length in PROMPT_TOKENS:
                (prompt,) = prompts(random, 1, length)
                names = list(pools)
                random.shuffle(names)
                for name in names:
                    if name != computed:
                        running[name].perform("bench.inside:save", [prompt])
                    (first_s,), (cached,) = running[name].perform("bench.inside:run", [prompt])
                    assert (cached > length // 2) == (name != computed), f"{name}: {cached} of {length} tokens"
                    running[name].perform("bench.inside:forget")
                    if turn:  # The first turn warms memory and connections.
                        taken.setdefault((name, length), []).append(1e3 * first_s)
    return {"": {name: [point(length, taken[name, length]) for length in PROMPT_TOKENS] for name in pools}}


MEASURED: Mapping[str, Callable[[], Panels]] = {
    "bandwidth": bandwidth,
    "planning": planning,
    "first-token": first_token,
}
IN_THE_ENGINE = {"first-token"}


def main() -> None:
    """Measure what this environment can; what it cannot stays as it was."""
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MEASURED, default=list(MEASURED))
    kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for name in parser.parse_args().only:
        if (name in IN_THE_ENGINE) == bool(find_spec("vllm")):
            kept[name] = MEASURED[name]()
    DATA.write_text(json.dumps({name: kept[name] for name in MEASURED if name in kept}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
