"""The store breaks under load; requests do not. Afterwards the pool serves again by itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.conftest import assert_same, loads
from tests.engine.engine import Engine, engine
from tests.engine.models import BLOCK_SIZE
from tests.engine.prompts import PROMPTS, poolable
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.targets.real_mooncake import RealMaster, real_master

LIMITS = {"lookup_timeout_s": 1.0, "load_timeout_s": 5.0, "outage_pause_s": 2.0, "drain_timeout_s": 5.0}
RECOVERY_LIMIT_S = 60.0
FEW_AT_ONCE = {"max_num_seqs": 4}
SEGMENT_BYTES = 32 << 20
LEASE_S = 1.0
BLOCK_BYTES = 32 * 2 * 3 * 2 * 64 * 4
"""Of the kind `gqa`: tokens, keys and values, layers, heads, width, bytes of a number."""
MANY = [[(i * 13 + j * (i + 5)) % 250 for j in range(300 + i)] for i in range(16)]
"""More prompts than the engine computes at once, so that a store can fail among them."""
TOO_MANY = [[(i * 17 + j * (i + 7)) % 250 for j in range(321)] for i in range(48)]
"""More than the pool can hold."""


@dataclass
class Outage:
    """A running engine with a master of its own."""

    master: RealMaster
    running: Engine


@pytest.fixture(scope="module")
def outage(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outage]:
    with real_master(SEGMENT_BYTES, LEASE_S) as master:
        config = write_mooncake_json(tmp_path_factory.mktemp("outage") / "mooncake.json", master.address)
        made = EngineSpec(models("gqa"), BLOCK_SIZE["gqa"], pool=LIMITS, mooncake_json=config, arguments=FEW_AT_ONCE)
        with engine(made) as running:
            yield Outage(master, running)


def assert_comes_back(running: Engine, expected: list[Answer]) -> None:
    """Past the local cache, the pool serves again within a while; every answer on the way is right."""
    deadline = time.monotonic() + RECOVERY_LIMIT_S
    while True:
        running.forget()
        answers = running.generate(PROMPTS)
        assert_same(answers, expected)
        if [answer.num_cached_tokens for answer in answers] == poolable(BLOCK_SIZE["gqa"]):
            break
        assert time.monotonic() < deadline, f"no full hit {RECOVERY_LIMIT_S:g} s after the store came back"
        time.sleep(0.5)
    running.assert_at_rest()


@pytest.mark.parametrize("failure", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("part", ["process", "owner"])
def test_a_part_of_the_store_fails_between_a_lookup_and_its_load(
    outage: Outage,
    plain: Callable[[str], Engine],
    baseline: Callable[[str], list[Answer]],
    part: str,
    failure: signal.Signals,
) -> None:
    expected = plain("gqa").generate(MANY)
    running = outage.running
    assert_comes_back(running, baseline("gqa"))
    assert_same(running.generate(MANY), expected)
    running.forget()
    before = running.counts()
    process = getattr(outage.master, part)
    with running.fault("signal_at_third_read", process.pid, failure.value):
        started = time.monotonic()
        assert_same(running.generate(MANY), expected)
        # One load may run into its limit, and after it a lookup of a second every two seconds.
        assert time.monotonic() - started < 30
        after = running.counts()
        lost = {name for name, count in loads(after).items() if count > before.get(name, 0)}
        assert lost > {"load_blocks_ok"}, "something was loaded before, and something was lost"
    started = time.monotonic()
    assert_same(running.generate(PROMPTS), baseline("gqa"))
    assert time.monotonic() - started < 15
    if failure == signal.SIGSTOP:
        process.send_signal(signal.SIGCONT)
    elif part == "owner":
        process.wait(10)
        outage.master.start_owner()
    else:
        process.wait(10)
        outage.master.start()
    assert_comes_back(running, baseline("gqa"))


def test_a_pool_smaller_than_what_is_asked(outage: Outage, plain: Callable[[str], Engine]) -> None:
    assert len(TOO_MANY) * (len(TOO_MANY[0]) // 32) * BLOCK_BYTES > 1.2 * SEGMENT_BYTES
    expected = plain("gqa").generate(TOO_MANY)
    before = outage.running.counts()
    for _ in range(2):
        # Whoever asks for everything in turn finds nothing of it; the last ones are still there.
        for first in (0, len(TOO_MANY) - 8):
            outage.running.forget()
            assert_same(outage.running.generate(TOO_MANY[first:]), expected[first:])
    after = outage.running.counts()
    assert after["load_blocks_ok"] > before.get("load_blocks_ok", 0)
    # Each round stored again what had had to make room.
    assert after["save_blocks_stored"] - before.get("save_blocks_stored", 0) > SEGMENT_BYTES // BLOCK_BYTES
    outage.running.assert_at_rest()
