"""Speed of the simulated store: copies against a plain memory copy, and the cost of a call with 10^6 keys in the store.

`python -m bench.twin [--repeats 15]`. Ratios of medians of interleaved repetitions, as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import time
from collections.abc import Callable

from kvpool_simulator.store import MasterOptions, MooncakeDistributedStore, SimulatedMaster

OBJECT_BYTES = 11_000_000
NUM_PIECES = 186
"""Of a block of DeepSeek-V3.2."""
MANY, FEW = 10**6, 10**3
BATCH = 1000


def seconds(act: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


class Copies:
    """One object's bytes, as one buffer and in pieces."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store
        # Whole pages, as caches are: a target a few bytes past the source's place in a page is copied 6 times slower.
        self._maps = [mmap.mmap(-1, OBJECT_BYTES) for _ in range(2)]
        self._source, self._target = (ctypes.addressof(ctypes.c_char.from_buffer(pages)) for pages in self._maps)
        for address in (self._source, self._target):
            ctypes.memset(address, 0x5A, OBJECT_BYTES)
            assert store.register_buffer(address, OBJECT_BYTES) == 0
        size = OBJECT_BYTES // NUM_PIECES
        sizes = [size] * (NUM_PIECES - 1) + [OBJECT_BYTES - size * (NUM_PIECES - 1)]
        starts = [size * i for i in range(NUM_PIECES)]
        self._from = [[self._source + start for start in starts]], [sizes]
        self._into = [[self._target + start for start in starts]], [sizes]

    def once(self) -> dict[str, float]:
        """Seconds of a plain copy, a put and a get of the same bytes."""
        taken = {
            "copy": seconds(lambda: ctypes.memmove(self._target, self._source, OBJECT_BYTES)),
            "put": seconds(lambda: self._store.batch_put_from_multi_buffers(["k"], *self._from)),
            "get": seconds(lambda: self._store.batch_get_into_multi_buffers(["k"], *self._into)),
        }
        assert self._store.remove("k", True) == 0
        return taken


def copies(store: MooncakeDistributedStore, repeats: int) -> dict[str, float]:
    """Speed of put and get as a share of a plain copy's."""
    work = Copies(store)
    work.once()
    runs = [work.once() for _ in range(repeats)]
    return {name: round(statistics.median(run["copy"] / run[name] for run in runs), 2) for name in ("put", "get")}


def per_call(store: MooncakeDistributedStore, held: int, repeats: int) -> dict[str, float]:
    """Seconds a key of a put, a lookup and a get among `held` keys."""
    memory = ctypes.create_string_buffer(64)
    rows = [[ctypes.addressof(memory)]] * BATCH, [[64]] * BATCH
    taken: dict[str, list[float]] = {"put": [], "exist": [], "get": []}
    for repeat in range(repeats):
        keys = [f"new-{held}-{repeat}-{i}" for i in range(BATCH)]
        taken["put"].append(seconds(lambda keys=keys: store.batch_put_from_multi_buffers(keys, *rows)))
        taken["exist"].append(seconds(lambda keys=keys: store.batch_is_exist(keys)))
        taken["get"].append(seconds(lambda keys=keys: store.batch_get_into_multi_buffers(keys, *rows)))
        store.batch_remove(keys, True)
    return {name: statistics.median(values) / BATCH for name, values in taken.items()}


def hold(store: MooncakeDistributedStore, number: int) -> None:
    """Put that many small objects."""
    memory = ctypes.create_string_buffer(64)
    for start in range(0, number, BATCH):
        keys = [f"old-{i}" for i in range(start, start + BATCH)]
        rows = [[ctypes.addressof(memory)]] * BATCH, [[64]] * BATCH
        assert store.batch_put_from_multi_buffers(keys, *rows) == [0] * BATCH


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    with SimulatedMaster("127.0.0.1:50051", options=MasterOptions(), profile="tcp") as master:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 30, 0, "tcp", "", master.address) == 0
        shares = copies(store, repeats)
        few = per_call(store, FEW, repeats)
        hold(store, MANY)
        many = per_call(store, MANY, repeats)
        store.close()
    growth = {name: round(many[name] / few[name], 2) for name in few}
    print(json.dumps({"share_of_a_plain_copy": shares, "cost_with_a_million_keys": growth}, indent=2))


if __name__ == "__main__":
    main()
