"""`bench`: what the store gives, and what the connector makes of it, for a named model and topology."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool_connector.cli.output import Answer, CommandError, Exit, Rows, in_bytes
from kvpool_connector.cli.picture import bars
from kvpool_connector.cli.roundtrip import own_keys, registered, round_trip
from kvpool_connector.cli.session import Session
from kvpool_connector.cli.shapes import NamedCache
from kvpool_connector.contract.store import Store

BAR = 20


@dataclass(frozen=True)
class Case:
    """What is measured: blocks of one rank of an engine of this shape, moved together."""

    model: str
    num_blocks: int = 8
    repeats: int = 5
    tp_size: int = 1
    pp_size: int = 1

    @property
    def words(self) -> str:
        """`deepseek-v3.2, TP 8, PP 2`."""
        sizes = [f"{name} {size}" for name, size in (("TP", self.tp_size), ("PP", self.pp_size)) if size > 1]
        return ", ".join([self.model, *sizes])


@dataclass(frozen=True)
class Speed:
    """Bytes a second of one way, both directions."""

    way: str
    save: float
    load: float


def bench(session: Session, case: Case, plot: Path | None = None) -> Answer:
    """Medians over the repeats: the raw store with one address an object, then the connector both ways."""
    cache = NamedCache(case.model, case.num_blocks, tp_size=case.tp_size, pp_size=case.pp_size)
    failures: list[str] = []
    speeds: list[Speed] = []
    if plot is not None:
        _check_writable(plot)
    with session.store() as store:
        # A first use makes connections and touches memory; nobody after it pays for that.
        _raw(store, cache, 1, failures)
        session.tell("measuring", 1, 4)
        speeds.append(Speed("raw store", *_raw(store, cache, case.repeats, failures)))
        session.tell("measuring", 2, 4)
        for done, way in enumerate(("packed", "direct"), 3):
            trip = round_trip(store, cache, way, case.repeats)
            failures += [f"{way}: {failure}" for failure in trip.failures]
            failures += [f"{way}: block {i} came back with other bytes" for i in trip.wrong_blocks]
            save, load = statistics.median(trip.save_s), statistics.median(trip.load_s)
            speeds.append(Speed(f"connector, {way}", trip.num_bytes / save, trip.num_bytes / load))
            session.tell("measuring", done, 4)
    title = (
        f"{case.num_blocks} x {case.words}: {in_bytes(cache.layout.object_bytes)} in {cache.layout.num_pieces} pieces"
    )
    lines = [f"{len(failures)} failures, the first: {failures[0]}"] if failures else []
    if plot is not None:
        rows = [(f"{speed.way}, {name}", getattr(speed, name)) for speed in speeds for name in ("save", "load")]
        plot.write_text(bars(title, [(words, found, f"{in_bytes(found)}/s") for words, found in rows]), "utf-8")
        lines.append(f"the picture is in {plot}")
    return Answer(
        {
            "model": case.model,
            "tensor_parallel_size": case.tp_size,
            "pipeline_parallel_size": case.pp_size,
            "num_blocks": case.num_blocks,
            "object_bytes": cache.layout.object_bytes,
            "num_pieces": cache.layout.num_pieces,
            "bytes_per_s": {speed.way: {"save": speed.save, "load": speed.load} for speed in speeds},
            "failures": failures,
        },
        [_table(title, speeds)],
        lines,
        Exit.ERROR if failures else Exit.WELL,
    )


def _table(title: str, speeds: Sequence[Speed]) -> Rows:
    best = max(max(speed.save, speed.load) for speed in speeds)
    rows = Rows(title, ("way", "save", "load", "load, to scale"))
    for speed in speeds:
        bar = "█" * max(1, round(BAR * speed.load / best))
        rows.rows.append((speed.way, f"{in_bytes(speed.save)}/s", f"{in_bytes(speed.load)}/s", bar))
    return rows


def _check_writable(path: Path) -> None:
    """Said before minutes of measuring. Raises `CommandError`."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CommandError(f"--plot {path} cannot be written; name a file in a directory that is there")


def _raw(store: Store, cache: NamedCache, repeats: int, failures: list[str]) -> tuple[float, float]:
    size = cache.layout.object_bytes
    addresses = [[cache.address + i * size] for i in range(cache.num_blocks)]
    sizes = [[size]] * cache.num_blocks
    saves: list[float] = []
    loads: list[float] = []
    with registered(store, cache.address, cache.num_bytes):
        cache.fill(0)
        for _ in range(repeats):
            with own_keys(store, cache.num_blocks) as keys:
                for call, seconds in ((store.put, saves), (store.get, loads)):
                    start = time.perf_counter()
                    statuses = call(keys, addresses, sizes)
                    seconds.append(time.perf_counter() - start)
                    failures += [f"raw: {status.value}" for status in statuses if not status.ok]
    total = cache.num_blocks * size
    return total / statistics.median(saves), total / statistics.median(loads)
