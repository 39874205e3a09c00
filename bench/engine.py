"""What the connector costs in the real engine where the pool cannot help, or hardly can.

Decoding steps of about 20 ms with a pool that never hits; prompts that the engine has itself; short prompts, of which
computing may be faster than loading.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from bench.measure import Row, spread
from tests.engine.engine import Engine
from tests.engine.models import BLOCK_SIZE, make_model
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.targets.real_mooncake import real_master

AREA = "Real engine"
ARGUMENTS = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
PLAIN = "the engine without a connector"

LAYERS, WIDTH = 12, 768
"""A model whose decoding step with eight requests takes about 20 ms on one core."""
NUM_RUNNING = 8
NUM_STEPS = 50
LOCAL_LENGTH = 1000
LOCAL_COUNT = 20

SHORT_LENGTHS = (40, 72, 136, 264)
SLOW_S = 0.03
"""A slower store's: longer than computing the longest of `SHORT_LENGTHS`."""
NUM_SHORT = 6
"""Prompts of a length in a turn, one after the other."""
NUM_LEARNING = 5
"""Turns before the measured ones."""
NEVER = 4096


@contextmanager
def engines(model: tuple[int, int], **pools: dict[str, Any] | None) -> Iterator[dict[str, Engine]]:
    """Engines of a GQA model by name, with one master; None for one without a connector."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        master = stack.enter_context(real_master(1 << 30, lease_s=5))
        config = write_mooncake_json(directory / "mooncake.json", master.address)
        path = make_model("gqa", directory, *model)
        running: dict[str, Engine] = {}
        for name, pool in pools.items():
            made = EngineSpec(path, BLOCK_SIZE["gqa"], pool=pool, mooncake_json=config, arguments=ARGUMENTS)
            running[name] = Engine(made)
            stack.callback(running[name].kill)
        yield running


def prompts(random: Random, count: int, length: int) -> list[list[int]]:
    """Of tokens that nobody has seen in this order."""
    return [[random.randrange(250) for _ in range(length)] for _ in range(count)]


def no_help(repeats: int) -> list[Row]:
    """Steps with a pool that never hits, and prompts that the engine has itself."""
    random = Random(7)
    ratios: dict[str, list[float]] = {"steps": [], "again": []}
    plain_ms: list[float] = []
    hooks_us: list[float] = []
    calls: list[int] = []
    with engines((LAYERS, WIDTH), without=None, ours={}) as running:
        for turn in range(repeats + 1):
            names = list(running)[:: 1 if turn % 2 else -1]
            many, (one,) = prompts(random, NUM_RUNNING, 100), prompts(random, 1, LOCAL_LENGTH)
            steps = {name: running[name].perform("bench.inside:steps", many, NUM_STEPS) for name in names}
            again = {name: running[name].perform("bench.inside:again", one, LOCAL_COUNT) for name in names}
            if not turn:  # The first turn fills caches.
                continue
            ratios["steps"].append(steps["ours"] / steps["without"])
            ratios["again"].append(again["ours"] / again["without"])
            plain_ms.append(1e3 * steps["without"] / NUM_STEPS)
            fresh = prompts(random, NUM_RUNNING, 100)
            hooks_us.append(1e6 * running["ours"].perform("bench.inside:steps", fresh, NUM_STEPS, True) / NUM_STEPS)
            calls.append(running["ours"].perform("bench.inside:calls_again", one, LOCAL_COUNT))
    step = f"{statistics.median(plain_ms):.0f} ms each"
    several = f"{NUM_RUNNING} requests with a pool that never hits"
    local = f"a prompt of {LOCAL_LENGTH:,} tokens that the engine has itself"
    return [
        Row(AREA, f"decoding steps of {several}", PLAIN, **spread(ratios["steps"]), at_most=1.02, note=step),
        Row(AREA, f"our hooks in a decoding step of {several}", "in microseconds", **spread(hooks_us), at_most=200),
        Row(AREA, f"time to first token of {local}", PLAIN, **spread(ratios["again"]), at_most=1.01),
        Row(AREA, f"calls to the store for {local}", "number", **spread(calls), at_most=0),
    ]


def short_prompts(repeats: int, lengths: tuple[int, ...], slow: bool) -> list[Row]:
    """`min_tokens_to_load: "auto"` against the better of always and never loading."""
    random = Random(11)
    pools: dict[str, Any] = {"load": 0, "compute": NEVER, "auto": "auto"}
    taken: dict[int, dict[str, list[float]]] = {length: {name: [] for name in pools} for length in lengths}
    loaded = dict.fromkeys(lengths, 0)
    # Saving off, except for one engine that is not measured: what is computed would be saved again.
    readers = {name: {"min_tokens_to_load": least} for name, least in pools.items()}
    with engines((3, 256), writer={}, **readers) as running, ExitStack() as stack:
        if slow:
            for name in pools:
                stack.enter_context(running[name].fault("slow_reads", SLOW_S))
        for turn, length in itertools.product(range(NUM_LEARNING + repeats), lengths):
            asked = prompts(random, NUM_SHORT, length)
            running["writer"].perform("bench.inside:save", asked)
            names = list(pools)
            random.shuffle(names)
            for name in names:
                seconds, cached = running[name].perform("bench.inside:ask_each", asked)
                if turn >= NUM_LEARNING:
                    taken[length][name].append(seconds)
                    loaded[length] += cached if name == "auto" else 0
    made = []
    for length, times in taken.items():
        better = min(("load", "compute"), key=lambda name: statistics.median(times[name]))
        share = loaded[length] / (NUM_SHORT * repeats * (length // BLOCK_SIZE["gqa"] * BLOCK_SIZE["gqa"]))
        where = f"a store with reads of {SLOW_S * 1e3:g} ms" if slow else "the store as it is"
        made.append(
            Row(
                AREA,
                f"time to first token of {length} tokens in the pool, `min_tokens_to_load` learnt, {where}",
                f"the better of loading and computing: {better}",
                **spread(auto / best for auto, best in zip(times["auto"], times[better], strict=True)),
                at_most=1.05,
                note=f"{share:.0%} loaded",
            )
        )
    return made


def rows(short: bool) -> list[Row]:
    """This part of the table."""
    # Tiny models gain nothing from more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if short:
        return [*no_help(3), *short_prompts(5, SHORT_LENGTHS[-1:], True)]
    return [
        *no_help(9),
        *short_prompts(15, SHORT_LENGTHS, False),
        *short_prompts(15, SHORT_LENGTHS, True),
    ]
