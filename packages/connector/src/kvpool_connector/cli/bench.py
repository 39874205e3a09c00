"""`bench`: what the store gives, and what the connector makes of it, for a named model."""

from __future__ import annotations

import statistics
import time

from kvpool_connector.cli.output import Answer, CommandError, Exit, Rows, in_bytes
from kvpool_connector.cli.roundtrip import own_keys, registered, round_trip
from kvpool_connector.cli.session import Session
from kvpool_connector.cli.shapes import NamedCache
from kvpool_connector.contract.store import Store

BAR = 20


def bench(session: Session, model: str, num_blocks: int, repeats: int, tp_size: int) -> Answer:
    """Medians over `repeats`: the raw store with one address an object, then the connector both ways."""
    if num_blocks < 1 or repeats < 1 or tp_size < 1:
        raise CommandError("--blocks, --repeats and --tensor-parallel-size are at least 1")
    cache = NamedCache(model, num_blocks, tp_size=tp_size)
    failures: list[str] = []
    speeds: list[tuple[str, float, float]] = []
    with session.store() as store:
        # A first use makes connections and touches memory; nobody after it pays for that.
        _raw(store, cache, 1, failures)
        speeds.append(("raw store", *_raw(store, cache, repeats, failures)))
        for way in ("packed", "direct"):
            trip = round_trip(store, cache, way, repeats)
            failures += [f"{way}: {failure}" for failure in trip.failures]
            failures += [f"{way}: block {i} came back with other bytes" for i in trip.wrong_blocks]
            save, load = statistics.median(trip.save_s), statistics.median(trip.load_s)
            speeds.append((f"connector, {way}", trip.num_bytes / save, trip.num_bytes / load))
    best = max(speed for _, *both in speeds for speed in both)
    rows = Rows(
        f"{num_blocks} x {model}: {in_bytes(cache.layout.object_bytes)} in {cache.layout.num_pieces} pieces",
        ("way", "save", "load", "load, to scale"),
        [
            (way, f"{in_bytes(save)}/s", f"{in_bytes(load)}/s", "█" * max(1, round(BAR * load / best)))
            for way, save, load in speeds
        ],
    )
    data = {
        "model": model,
        "object_bytes": cache.layout.object_bytes,
        "num_pieces": cache.layout.num_pieces,
        "bytes_per_s": {way: {"save": save, "load": load} for way, save, load in speeds},
        "failures": failures,
    }
    lines = [f"{len(failures)} failures, the first: {failures[0]}"] if failures else []
    return Answer(data, [rows], lines, Exit.ERROR if failures else Exit.WELL)


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
