"""Where the pool cannot help it costs next to nothing: no hits, saving off."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from tests.engine.engine import engine
from tests.engine.spec import EngineSpec

LIMIT_S = 200e-6
NUM_STEPS = 200


def test_hooks_take_little_of_a_step(spec: Callable[..., EngineSpec], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {"max_model_len": 512, "max_num_seqs": 64}
    made = spec("gqa", "overhead", {"consumer_is_to_load": True}, role="kv_consumer", arguments=arguments)
    found = {}
    with engine(made) as running:
        for number in (1, 16, 64):
            prompts = [[(j * (i + number) + i) % 250 for j in range(40)] for i in range(number)]
            found[number] = running.perform("hook_seconds", prompts, NUM_STEPS)
    with capsys.disabled():
        for number, seconds in found.items():
            median, worst = statistics.median(seconds), statistics.quantiles(seconds, n=100)[-1]
            print(f"\n{number} running requests: {median * 1e6:.0f} us a step in all hooks, 99 % {worst * 1e6:.0f} us")
    for number, seconds in found.items():
        assert statistics.median(seconds) <= LIMIT_S, f"{number} running requests"
