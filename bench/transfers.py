"""Saves and loads of whole requests by a worker, against the store's raw multi-buffer call with ready lists.

The raw call gets its keys, addresses and sizes made beforehand, in calls of at most `RAW_BUFFERS` buffers: more than
about 2,048 in one call fail or hang over TCP. Ours is everything that a step does: keys, the question what is there,
claims, copies through staging, the store's calls, and the report. Learnt transfer has met as many requests before as it
needs to choose, and goes on looking at both ways.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.layerwise import Bench, pool
from bench.measure import Row, seconds, spread
from kvpool_connector.learnt_transfer import SAMPLES

RAW_BUFFERS = 1900
MAX_BYTES = 128 << 20
"""Of one request: more takes no other time a byte, and the machine has little memory."""
MAX_PIECES = 8_000
"""Of one request: the raw call needs 30 to 60 microseconds for each over TCP."""


@dataclass(frozen=True)
class Shape:
    """A model's block: bytes of the components of one layer, and layers."""

    name: str
    pages: tuple[int, ...]
    num_layers: int = 61
    at_least: float | None = None
    """The target over TCP: times the raw call's bandwidth."""


MODELS = (
    Shape("DeepSeek-V3.2", (131072, 16384, 32768), at_least=1.5),
    Shape("DeepSeek-V3", (131072, 16384)),
    Shape("DeepSeek-V3.2 with C8", (131072, 16384, 16384, 256)),
    Shape("Qwen3-32B, TP 8", (32768, 32768), 64),
)
SIZES = tuple(
    Shape(f"2 x {kib:g} KiB a layer", (int(kib * 1024),) * 2, at_least=10.0 if kib <= 4 else 3.0 if kib == 16 else None)
    for kib in (0.5, 1, 2, 4, 8, 16)
)
BLOCKS = (8, 32, 128, 512)
WAYS: Mapping[str, dict[str, Any]] = {way: {"transfer": way} for way in ("packed", "direct", "learnt")}
WARM_TURNS = SAMPLES + 1
"""Before the measured ones: they warm memory and connections, and learnt transfer learns."""


class Raw:
    """The same blocks by the store's own Python call."""

    def __init__(self, bench: Bench, client: Any) -> None:
        self._client = client
        caches = [component for layer in bench.caches.values() for component in layer]
        sizes = [cache[0].numel() for cache in caches]
        ids = range(bench.num_blocks)
        addresses = [[c.data_ptr() + i * size for c, size in zip(caches, sizes, strict=True)] for i in ids]
        per_call = max(1, RAW_BUFFERS // len(sizes))
        self._parts = [
            (addresses[i : i + per_call], [sizes] * len(addresses[i : i + per_call])) for i in ids[::per_call]
        ]
        self._keys: list[list[str]] = []

    def renew(self) -> None:
        """Keys that nobody has."""
        turn = uuid.uuid4().hex
        self._keys = [[f"{turn}/{i}/{j}" for j in range(len(a))] for i, (a, _) in enumerate(self._parts)]

    def save(self) -> None:
        """All blocks."""
        for keys, (addresses, sizes) in zip(self._keys, self._parts, strict=True):
            answers = self._client.batch_put_from_multi_buffers(keys, addresses, sizes)
            assert not any(answers), f"the raw put failed: {answers}"

    def load(self) -> None:
        """All blocks."""
        for keys, (addresses, sizes) in zip(self._keys, self._parts, strict=True):
            answers = self._client.batch_get_into_multi_buffers(keys, addresses, sizes)
            assert all(answer > 0 for answer in answers), f"the raw get failed: {answers}"

    def forget(self) -> None:
        """Remove what was stored."""
        for keys in self._keys:
            self._client.batch_remove(keys, True)


def measure(store: Any, shape: Shape, num_blocks: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by `save` and `load`, by way (`raw`, and those of `WAYS`), in turns."""
    bench = Bench(store, shape.num_layers, shape.pages, num_blocks, WAYS)
    raw = Raw(bench, store._open())
    ways = ["raw", *WAYS]
    taken: dict[str, dict[str, list[float]]] = {what: {way: [] for way in ways} for what in ("save", "load")}
    try:
        for turn in range(WARM_TURNS + repeats):
            order = ways[turn % len(ways) :] + ways[: turn % len(ways)]
            raw.renew()
            for what in taken:
                for way in order:
                    took = seconds(getattr(raw, what)) if way == "raw" else getattr(bench, what)(way, turn, 0.0)
                    if turn >= WARM_TURNS:
                        taken[what][way].append(took)
            raw.forget()
            bench.forget(store, turn)
    finally:
        bench.close()
    return taken


def block_counts(shape: Shape, short: bool) -> Iterator[int]:
    """Those of `BLOCKS` that fit."""
    pieces = len(shape.pages) * shape.num_layers
    size = sum(shape.pages) * shape.num_layers
    fitting = [n for n in BLOCKS if n == BLOCKS[0] or (n * pieces <= MAX_PIECES and n * size <= MAX_BYTES)]
    return iter(fitting[:1] if short else fitting)


@dataclass(frozen=True)
class Place:
    """Where the memory is, and the way meant for it."""

    name: str
    words: str
    way: str
    other: str


RAW = "the raw multi-buffer call"
REMOTE = Place("remote", "over TCP", "packed", "direct")
LOCAL = Place("local", "local", "direct", "packed")


def row(taken: Mapping[str, list[float]], way: str, base: str, what: str, against: str, at_least: float | None) -> Row:
    """Bandwidth of one way in terms of another's."""
    ratios = [theirs / ours for theirs, ours in zip(taken[base], taken[way], strict=True)]
    return Row("Transfer", what, against, **spread(ratios), at_least=at_least)


def compared(place: Place, shapes: Iterable[Shape], repeats: int, short: bool) -> list[Row]:
    """The way meant for a place against the raw call at every point; at the worst one, against the other way, and what
    learnt transfer takes against the better of both."""
    to_raw: list[Row] = []
    to_other: list[Row] = []
    learnt: list[Row] = []
    with pool(place.name) as store:
        for shape in shapes:
            for num_blocks in block_counts(shape, short):
                for what, taken in measure(store, shape, num_blocks, repeats).items():
                    point = f"{what} of {num_blocks} blocks, {shape.name}, {place.words}: bandwidth"
                    better = min(("packed", "direct"), key=lambda way, taken=taken: statistics.median(taken[way]))
                    at_least = shape.at_least if place is REMOTE else 0.95
                    to_raw.append(row(taken, place.way, "raw", f"{place.way} {point}", RAW, at_least))
                    to_other.append(
                        row(taken, place.way, place.other, f"{place.way} {point}", f"{place.other} transfer", 0.95)
                    )
                    learnt.append(
                        row(taken, "learnt", better, f"learnt {point}", f"the better of both: {better}", 0.95)
                    )
    worst = [min(points, key=lambda row: row.median) for points in (to_other, learnt)]
    return [*to_raw, *(replace(row, note=f"the worst of {len(learnt)} points") for row in worst)]


def rows(short: bool) -> list[Row]:
    """This part of the table."""
    if short:
        few = (MODELS[0], SIZES[3])
        return [row for place in (REMOTE, LOCAL) for row in compared(place, few, 5, True)]
    return [*compared(REMOTE, (*MODELS, *SIZES), 9, False), *compared(LOCAL, (*MODELS, *SIZES), 15, False)]
