"""Save and load in the real engine against vLLM's own connector for Mooncake: same model, same master, in turns.

Ours is measured in both of its ways: loads that the step waits for (the default), and loads between steps
(`load_async`), which is the only way of vLLM's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from bench.measure import Row, spread
from tests.engine.engine import Engine, EngineError
from tests.engine.models import BLOCK_SIZE, KINDS, make_model
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.targets.real_mooncake import real_master

LENGTHS = (300, 1000, 3000)
ARGUMENTS = {"max_num_seqs": 4, "max_num_batched_tokens": 4096}
OURS, BETWEEN, THEIRS = "ours", "ours with load_async", "vLLM's `MooncakeStoreConnector`"
WHAT = (
    ("save", "hooks_wall_s", "time in the hooks, saving", 0.8),
    ("load", "hooks_wall_s", "time in the hooks, loading", 0.8),
    ("save", "cpu_s", "processor time, saving", 0.8),
    ("load", "cpu_s", "processor time, loading", 0.8),
    ("load", "first_token_s", "time to first token on a hit", 0.95),
)


def specs(kind: str, directory: Path, address: str) -> dict[str, EngineSpec]:
    """Engines by connector. With several groups ours always loads between steps."""
    size = {"local_buffer_size": "64MB"}
    ours = write_mooncake_json(directory / "ours.json", address, **size)
    theirs = write_mooncake_json(directory / "theirs.json", address, **size, mode="standalone-store")

    def spec(mooncake_json: Path, **more: Any) -> EngineSpec:
        model, block_size = make_model(kind, directory), BLOCK_SIZE[kind]
        return EngineSpec(model, block_size, mooncake_json=mooncake_json, arguments=ARGUMENTS, **more)

    made = {
        OURS: spec(ours, pool={"namespace": kind}),
        BETWEEN: spec(ours, pool={"namespace": f"{kind}-async", "load_async": True}),
        THEIRS: spec(
            theirs, pool={}, connector="MooncakeStoreConnector", module=None, patches=("bench.inside:cpu_events",)
        ),
    }
    if kind == "two-groups":
        del made[BETWEEN]
    return made


def measure(kind: str, lengths: Sequence[int], repeats: int, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """What was measured: `idle`, by connector; and `turns`, by length, of measurements by connector and phase."""
    random = Random(kind)
    turns: dict[int, list[dict[str, Any]]] = {length: [] for length in lengths}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        master = stack.enter_context(real_master(1 << 30, lease_s=5))
        running: dict[str, Engine] = {}
        for name, spec in specs(kind, directory, master.address).items():
            if name not in leave_out:
                running[name] = Engine(spec)
                stack.callback(running[name].kill)
        names = list(running)
        for turn in range(repeats + 1):
            for length in lengths:
                prompt = [random.randrange(250) for _ in range(length)]
                random.shuffle(names)
                one = {name: running[name].perform("bench.inside:save_and_load", prompt) for name in names}
                hits = {name: found["load"]["cached"] for name, found in one.items()}
                assert len(set(hits.values())) == 1, f"unequal hits: {hits}"
                assert hits[THEIRS] > length // 2, f"no hits: {hits}"
                if turn:  # The first turn warms memory and connections.
                    turns[length].append(one)
        return {"idle": {name: running[name].perform("bench.inside:idle") for name in names}, "turns": turns}


def compared(kind: str, found: Mapping[str, Any]) -> list[Row]:
    """Ratios of ours to theirs. Of processor time, what the same threads use at rest is taken off."""

    def value(one: Mapping[str, Any], name: str, phase: str, what: str) -> float:
        taken = one[name][phase]
        rest = found["idle"][name] * taken["elapsed_s"] if what == "cpu_s" else 0.0
        return float(taken[what] - rest)

    ours = [name for name in (OURS, BETWEEN) if name in found["idle"]]
    return [
        Row(
            "Real engine",
            f"{kind}, {length:,} tokens, {name}: {words}",
            THEIRS,
            **spread(value(one, name, phase, what) / value(one, THEIRS, phase, what) for one in turns),
            at_most=target,
        )
        for name in ours
        for phase, what, words, target in WHAT
        for length, turns in found["turns"].items()
    ]


def rows(short: bool) -> list[Row]:
    """This part of the table."""
    # Tiny models gain nothing from more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"
    if short:
        # A step that waits for its loads is by design longer in its hooks than one that does not.
        return compared("gqa", measure("gqa", (1000,), 3, leave_out=(OURS,)))
    made = []
    for kind in KINDS:
        try:
            made += compared(kind, measure(kind, LENGTHS, 7))
        except EngineError as error:
            print(f"{kind}: not measured: {error}", flush=True)
    return made
