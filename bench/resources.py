"""Memory over very many requests, the longest stall of the engine's thread, and the pace of the simulated cluster."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

from bench.layerwise import Bench
from bench.measure import Row, spread
from bench.planning import BLOCK_SIZE, hashes_of, shard_map, v32_layout
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.topology import Topology
from kvpool_connector.metadata import LoadReport
from kvpool_connector.planner import Planner
from kvpool_connector.scheduler import PoolScheduler, ScheduledRequest
from kvpool_connector.tracker import GroupRule, RequestView
from tests.targets.real_mooncake import make_store, real_master

NUM_BLOCKS = 10_000
WARM_REQUESTS = 10_000
NUM_REQUESTS = 1_000_000
NUM_LOADS = 100_000
STALL_BLOCKS = 16
V32_PAGES = (131072, 16384, 32768)
NOTED_S = 1e-4
"""Looks at the clock that lie further apart are a stall."""
STALL_WAYS = {way: {"transfer": way} for way in ("packed", "direct")}


class Present:
    """A lookup of a pool that has half of what is asked for, and no marker of a reset."""

    def exist(self, keys: Sequence[str]) -> list[Status]:
        """The blocks of the first half."""
        half = len(keys) // 2
        return [Status.MISS if i < 2 or i > half else Status.OK for i in range(len(keys))]

    def mark(self, key: str) -> Status:
        """Nothing is marked here."""
        return Status.OK

    def close(self) -> None:
        """Nothing to give back."""


def resident() -> int:
    """Bytes of this process's memory now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def request_memory(num_requests: int) -> float:
    """Memory after `num_requests` requests with hits, loads, saves, failures and aborts, against that after a few.

    Meanwhile a planner has met all of `NUM_BLOCKS` blocks of DeepSeek-V3.2.
    """
    planner = Planner(v32_layout(NUM_BLOCKS))
    scheduler = PoolScheduler([GroupRule(BLOCK_SIZE)], BLOCK_SIZE, Present())
    scheduler.set_shards(shard_map(Topology(1)))
    hashes, num_tokens = hashes_of(12), 8 * BLOCK_SIZE + 1
    start = 0
    for i in range(num_requests):
        if i == WARM_REQUESTS:
            start = resident()
        view = RequestView(f"request-{i}", num_tokens, num_tokens, hashes[i % 4 : i % 4 + 8])
        blocks = [(9 * i + j) % NUM_BLOCKS for j in range(9)]
        found, _ = scheduler.num_matched_tokens(view, 0)
        scheduler.allocated(view, [blocks], found)
        step = scheduler.build_step(
            [ScheduledRequest(view.request_id, [blocks], True, found, num_tokens - found)],
        )
        planner.addresses([block for job in step.saves for group in job.blocks for block in group.block_ids])
        ended = frozenset((view.request_id,))
        scheduler.report(LoadReport(failed=ended) if i % 10 == 9 else LoadReport(loaded=ended))
        scheduler.finished(view.request_id, num_tokens + 1, completed=i % 7 != 6)
    scheduler.build_step([])
    assert not scheduler.num_tracked, f"{scheduler.num_tracked} ended requests are remembered"
    return resident() / start


def memory(short: bool) -> list[Row]:
    """One row: each repetition in a process of its own."""
    number, repeats = (100_000, 2) if short else (NUM_REQUESTS, 2)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        ratios = [processes.submit(request_memory, number).result() for _ in range(repeats)]
    return [
        Row(
            "Memory",
            f"process of the scheduler side and of a planner of {NUM_BLOCKS:,} blocks, after {number:,} requests",
            f"after {WARM_REQUESTS:,}",
            **spread(ratios),
            at_most=1.05,
        )
    ]


class CoreWait:
    """How long this thread has waited for a core, as the kernel counts it (Linux: `schedstat`).

    The file is read without giving up Python's lock, since to get that back is what is measured.
    """

    def __init__(self) -> None:
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._buffer = ctypes.create_string_buffer(128)
        self._pread = ctypes.PyDLL(None).pread

    def __call__(self) -> float:
        """Seconds since the thread began."""
        size = self._pread(self._file, self._buffer, 127, 0)
        return int(self._buffer.raw[:size].split()[1]) * 1e-9

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def longest_gaps(act: Callable[[], object]) -> tuple[float, float]:
    """The longest time in seconds that this thread, which does nothing but look at the clock, stood while `act` ran;
    and the longest without the time that it waited for a core: the time that it waited for Python's lock."""
    core_wait = CoreWait()
    thread = threading.Thread(target=act)
    clock, longest, longest_locked = time.perf_counter, 0.0, 0.0
    waited = core_wait()
    thread.start()
    last = clock()
    while thread.is_alive():
        for _ in range(200):
            now = clock()
            if now - last > NOTED_S:
                before, waited = waited, core_wait()
                longest = max(longest, now - last)
                longest_locked = max(longest_locked, now - last - (waited - before))
            last = now
        waited = core_wait()
        last = clock()
    thread.join()
    core_wait.close()
    return longest, longest_locked


def load_elsewhere(address: str, connection: Connection) -> None:
    """Another process: a packed load whenever asked."""
    store = make_store(address, 0)
    bench = Bench(store, 61, V32_PAGES, STALL_BLOCKS, {"packed": STALL_WAYS["packed"]})
    bench.save("packed", 0, 0.0)
    connection.send(True)
    while connection.recv():
        bench.load("packed", 0, 0.0)
        connection.send(True)
    bench.close()
    store.close()


def stalls(repeats: int) -> list[Row]:
    """Milliseconds, by direction and way; first what the machine does without any and with another process's load."""
    found: dict[str, list[tuple[float, float]]] = {}
    with real_master(2 << 30, lease_s=10) as master:
        ours, theirs = Pipe()
        other = get_context("spawn").Process(target=load_elsewhere, args=(master.address, theirs), daemon=True)
        other.start()
        ours.recv()
        store = make_store(master.address, 0)
        bench = Bench(store, 61, V32_PAGES, STALL_BLOCKS, STALL_WAYS)
        for turn in range(repeats + 1):
            acts: dict[str, Callable[[], object]] = {
                "no transfer": lambda: time.sleep(0.2),
                "the packed load, by another process": lambda: (ours.send(True), ours.recv()),
            }
            for what, way in itertools.product(("save", "load"), STALL_WAYS):
                move = getattr(bench, what)
                acts[f"{what}, {way}"] = lambda move=move, way=way, turn=turn: move(way, turn, 0.0)
            for name, act in acts.items():
                gaps = longest_gaps(act)
                if turn:  # The first turn warms memory and connections.
                    found.setdefault(name, []).append(gaps)
            bench.forget(store, turn)
        ours.send(False)
        other.join(30)
        bench.close()
        store.close()
    return [
        Row(
            "Stall",
            f"longest stall of the engine's thread, {STALL_BLOCKS} blocks of DeepSeek-V3.2 over TCP, {name}{cause}",
            "in milliseconds",
            **spread(gap[i] * 1e3 for gap in gaps),
            at_most=3.0 if name in ("save, packed", "load, packed") else None,
        )
        for name, gaps in found.items()
        for i, cause in enumerate(("", ": without its wait for a core"))
    ]


def simulated() -> list[Row]:
    """One row: the simulated cluster's pace."""
    command = [sys.executable, "-m", "tests.cluster", "--profile", "soak", "--jobs", "2", "--loads", str(NUM_LOADS)]
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        match = re.search(r"checked byte by byte: (\d+) block loads", told)
        assert match, told
        taken.append((time.perf_counter() - start) * NUM_LOADS / int(match[1]))
    return [
        Row(
            "Simulation",
            f"16 ranks, tiny DeepSeek-V3.2: {NUM_LOADS:,} block loads checked byte by byte",
            "60 seconds",
            **spread(seconds / 60 for seconds in taken),
            at_most=1.0,
        )
    ]


def rows(short: bool) -> list[Row]:
    """This part of the table."""
    return memory(True) if short else [*memory(False), *stalls(9), *simulated()]
