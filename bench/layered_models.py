"""Layer by layer against whole-request transfer, with the caches of whole models: ratios of times in the same turn.

`python -m bench.layered_models [--write]`

Real Mooncake over TCP on loopback; a process of its own owns the memory. The engine is the simulated one in real time
(`bench.real_time`). The caches are those that vLLM-Ascend registers for one rank, as the simulator allocates them:
latent, rope and indexer of 61 layers of DeepSeek-V3.2, the indexer as an entry of its own, in bf16 or quantised with
its scales, and a model with small pages of the same kinds. Computing takes as long as a packed load without any. All
ways of transfer take turns in every repetition; what counts is the median of the ratios within one. `--write` puts
what was measured into `bench/layered_models.json` and its table into `docs/layerwise.md`; `python -m bench` makes rows
of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.layerwise import PAGE, ROOT, WAYS, pool
from bench.measure import Row, spread
from bench.real_time import EngineBench
from kvpool_simulator.device.models import Mla, Model, model, rank_spec

RESULTS = ROOT / "bench" / "layered_models.json"
BEGIN, END = "<!-- models: begin -->\n", "<!-- models: end -->\n"
MODEL_WAYS = {way: WAYS[way] for way in ("direct", "packed", "layers")}
REPEATS, SHORT_REPEATS = 15, 3
RECENT = 5
"""Packed loads, the last so many, whose median is the computing of a step."""


@dataclass(frozen=True)
class Deployed:
    """A model as one rank registers it, and what layer by layer is to take of the other ways' time."""

    name: str
    model: Model
    at_most: dict[str, float]
    """By way."""
    blocks: tuple[int, ...] = (8, 16)
    options: dict[str, Any] = field(default_factory=dict)


TARGETS = {"direct": 0.6, "packed": 0.7}
MODELS = (
    Deployed("DeepSeek-V3.2", model("deepseek-v3.2"), TARGETS),
    Deployed("DeepSeek-V3.2 with C8 indexer", model("deepseek-v3.2"), TARGETS, options={"c8": True}),
    Deployed("61 layers of 5.6 KB", Model("small", 61, Mla(128, 16, 32), 16), {"packed": 1.1}, (8, 16, 64)),
)


def measure(store: Any, deployed: Deployed, num_blocks: int, repeats: int) -> dict[str, Any]:
    """One point: milliseconds of computing, and ratios by what is done and against what."""
    spec = rank_spec(deployed.model, **deployed.options)
    benches = {
        way: EngineBench(store, spec, deployed.model.block_size, num_blocks, settings)
        for way, settings in MODEL_WAYS.items()
    }
    ways, packed = list(benches), benches["packed"]
    for turn in (-3, -2):
        for bench in benches.values():  # Warms memory, staging and connections.
            bench.save(turn, 0.0)
            bench.load(turn, 0.0)
    # A load's time without computing: measured again in every turn, since the machine has other load, which changes.
    whole = [packed.load(-2, 0.0) for _ in range(RECENT)]
    for bench in benches.values():
        bench.forget()
    taken: dict[str, dict[str, list[float]]] = {what: {way: [] for way in ways} for what in ("load", "save")}
    path: dict[str, dict[str, list[float]]] = {what: {way: [] for way in ways} for what in ("load", "save")}
    for turn in range(repeats):
        order = ways[turn % len(ways) :] + ways[: turn % len(ways)]
        computing_s = statistics.median(whole[-RECENT:])
        for way in order:
            token_s, saved_s = benches[way].save(turn, computing_s)
            taken["save"][way].append(saved_s)
            path["save"][way].append(token_s - computing_s)
        for way in order:
            token_s = benches[way].load(turn, computing_s)
            taken["load"][way].append(token_s)
            path["load"][way].append(token_s - computing_s)
        whole.append(packed.load(turn, 0.0))
        for bench in benches.values():
            bench.forget()
    for bench in benches.values():
        bench.close()
    found: dict[str, Any] = {
        "model": deployed.name,
        "layers": deployed.model.num_layers,
        "blocks": num_blocks,
        "object_bytes": packed.object_bytes,
        "computing_ms": round(statistics.median(whole) * 1e3, 3),
    }
    for what, by_way in taken.items():
        found[f"{what}_path_ms"] = {
            way: round(max(0.0, statistics.median(steps)) * 1e3, 2) for way, steps in path[what].items()
        }
        found[what] = {
            way: spread(mine / theirs for mine, theirs in zip(by_way["layers"], by_way[way], strict=True))
            for way in ways
            if way != "layers"
        }
    return found


def measured(repeats: int, *, first_only: bool = False) -> Iterator[dict[str, Any]]:
    """All points."""
    with pool("remote") as store:
        for deployed in MODELS:
            for num_blocks in deployed.blocks[: 1 if first_only else None]:
                yield measure(store, deployed, num_blocks, repeats)


def as_rows(points: Sequence[dict[str, Any]]) -> list[Row]:
    """What was measured, with its targets."""
    targets = {deployed.name: deployed.at_most for deployed in MODELS}
    return [
        Row(
            "Layer by layer",
            f"{what} of {one['blocks']} blocks, {one['model']}, over TCP, as much computing: time",
            f"{way} transfer of whole blocks",
            **ratio,
            at_most=targets[one["model"]].get(way),
        )
        for one in points
        for what in ("load", "save")
        for way, ratio in one[what].items()
    ]


def rows(short: bool) -> list[Row]:
    """This part of the table of `python -m bench`."""
    return as_rows(list(measured(SHORT_REPEATS if short else REPEATS, first_only=short)))


def table(points: Sequence[dict[str, Any]]) -> str:
    """The points as Markdown."""
    targets = {deployed.name: deployed.at_most for deployed in MODELS}
    lines = [
        "| blocks | computing, ms | what | against direct | against packed | on the step's path, ms |",
        "|---|---|---|---|---|---|",
    ]
    for one in points:
        for what in ("load", "save"):
            cells = [
                f"{one['blocks']} of {one['model']} ({one['object_bytes']:,} B each)",
                f"{one['computing_ms']:.1f}",
                what,
            ]
            for way in ("direct", "packed"):
                ratio = one[what][way]
                target = targets[one["model"]].get(way)
                asked = f", asked {target:g}" if target else ""
                behind = ", **not reached**" if target and ratio["median"] > target else ""
                cells.append(f"{ratio['median']:.3f} ({ratio['low']:.2f} to {ratio['high']:.2f}){asked}{behind}")
            path = one[f"{what}_path_ms"]
            cells.append(", ".join(f"{path[way]:.1f} ({way})" for way in MODEL_WAYS))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written(page: str, points: Sequence[dict[str, Any]]) -> str:
    """The page with the table of these points."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + "\n" + table(points) + "\n" + END + rest.split(END)[1]


def keep(points: Sequence[dict[str, Any]], results: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the points and their table."""
    results.write_text("[\n" + ",\n".join(map(json.dumps, points)) + "\n]\n", encoding="utf-8")
    page.write_text(written(page.read_text(encoding="utf-8"), points), encoding="utf-8")


def main() -> None:
    """Print one line of JSON a point."""
    parser = argparse.ArgumentParser(prog="python -m bench.layered_models")
    parser.add_argument("--write", action="store_true", help="keep the results")
    asked = parser.parse_args()
    points = []
    for one in measured(REPEATS):
        points.append(one)
        print(json.dumps(one), flush=True)
    if asked.write:
        keep(points)


if __name__ == "__main__":
    main()
