"""Two engines share a small pool for a while, and everything happens to them at random.

`--soak-seconds` says how long (the nightly session: 20 minutes), `--soak-seed` shows a run again as far as time allows.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.engine.conftest import SHORT, assert_same
from tests.engine.engine import Engine, engine
from tests.engine.inside import STATES
from tests.engine.models import BLOCK_SIZE
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.engine.test_outages import LEASE_S, LIMITS
from tests.targets.real_mooncake import RealMaster, real_master

SEGMENT_BYTES = 24 << 20
NUM_BLOCKS = 80
MAX_TOKENS = 16
MEND_LIMIT_S = 60.0
STEMS = [[(i * 19 + j * (i + 2)) % 250 for j in range(160)] for i in range(6)]
PROMPTS = [[*STEMS[i % 6], *((j * (i + 3)) % 249 for j in range(9 * i))] for i in range(36)]
"""Six families that share their beginnings; together more than the pool holds, and far more than a cache does."""
FAULTS = (None, None, None, "lose_first", "lose_middle", "lose_last")
BREAKS = {"master killed": 1, "master hung": 1, "owner killed": 1, "owner hung": 1, None: 26}
"""What befalls the store while it is asked, by weight."""


@contextmanager
def broken(master: RealMaster, what: str | None) -> Iterator[None]:
    """Something of the store fails for a while."""
    if what is None:
        yield
        return
    part, how = what.split()
    process = master.process if part == "master" else master.owner
    assert process is not None
    if how == "hung":
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)
        return
    process.kill()
    process.wait(10)
    try:
        yield
    finally:
        (master.start if part == "master" else master.start_owner)()


class Soak:
    """A run of random rounds. Every answer is compared with that of an engine without a connector."""

    def __init__(self, seed: int, master: RealMaster, engines: Sequence[Engine], expected: Sequence[Answer]) -> None:
        self._random = random.Random(seed)
        self._master = master
        self._engines = engines
        self._expected = expected
        self.happened: Counter[str] = Counter()

    def round(self) -> None:
        """Ask, or abort, with or without a fault."""
        chance = self._random
        if chance.random() < 0.3:
            for one in self._engines:
                one.forget()
        if chance.random() < 0.15:
            self._abort(chance.choice(self._engines))
            return
        (what,) = chance.choices(list(BREAKS), list(BREAKS.values()))
        salt, fault = chance.choice((None, None, "one", "another")), chance.choice(FAULTS)
        batches = [self._batch(24) for _ in self._engines]
        self.happened.update({f"store: {what}": 1, f"fault: {fault}": 1, "requests": sum(map(len, batches))})
        with ExitStack() as faults:
            for one in self._engines:
                faults.enter_context(one.fault(fault) if fault else nullcontext())
            for one, batch in zip(self._engines, batches, strict=True):
                one.ask([PROMPTS[i] for i in batch], MAX_TOKENS, salt)
            with broken(self._master, what):
                answers = [one.answers() for one in self._engines]
        for batch, found in zip(batches, answers, strict=True):
            assert_same(found, [self._expected[i] for i in batch])

    def _batch(self, most: int) -> list[int]:
        return [self._random.randrange(len(PROMPTS)) for _ in range(self._random.randint(1, most))]

    def _abort(self, one: Engine) -> None:
        # Loading needs a hit, and prefilling none: neither can be had at any time.
        state = self._random.choice(("waiting", "decoding"))
        assert state in STATES
        victims, others = self._batch(4), self._batch(12)
        answers = one.perform("abort", state, [PROMPTS[i] for i in victims], [PROMPTS[i] for i in others], MAX_TOKENS)
        assert_same(answers, [self._expected[i] for i in others])
        self.happened.update({f"aborts: {state}": len(victims), "requests": len(others)})


def test_soak(
    request: pytest.FixtureRequest,
    models: Callable[[str], Path],
    plain: Callable[[str], Engine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds, seed = (
        request.config.getoption(f"--soak-{name}", default=d) for name, d in (("seconds", 30), ("seed", 1))
    )
    expected = plain("gqa").generate(PROMPTS, MAX_TOKENS)
    with ExitStack() as stack:
        master = stack.enter_context(real_master(SEGMENT_BYTES, LEASE_S))
        config = write_mooncake_json(tmp_path / "mooncake.json", master.address)
        engines = [
            stack.enter_context(
                engine(
                    EngineSpec(
                        models("gqa"),
                        BLOCK_SIZE["gqa"],
                        pool={**LIMITS, "save_decode_cache": True, "load_async": load_async},
                        mooncake_json=config,
                        num_blocks=NUM_BLOCKS,
                        arguments=SHORT,
                    )
                )
            )
            for load_async in (False, True)
        ]
        soak = Soak(seed, master, engines, expected)
        deadline, rounds = time.monotonic() + seconds, 0
        try:
            while time.monotonic() < deadline:
                soak.round()
                rounds += 1
        except AssertionError as error:
            raise AssertionError(f"--soak-seed {seed}, round {rounds}, after {dict(soak.happened)}: {error}") from error
        counts = [one.counts() for one in engines]
        with capsys.disabled():
            print(f"\nsoak, seed {seed}: {rounds} rounds in {seconds:g} s: {dict(soak.happened)}")
            for one in counts:
                print(f"  {one}")
        for one in counts:
            assert one["load_blocks_ok"] > 0
        for one in engines:
            one.assert_at_rest()
        assert_serves_again(engines[0])


def assert_serves_again(one: Engine) -> None:
    """Whatever happened before, the pool is of use again after a while."""
    deadline = time.monotonic() + MEND_LIMIT_S
    while True:
        one.forget()
        if one.generate(PROMPTS[:1])[0].num_cached_tokens >= (len(PROMPTS[0]) - 1) // 32 * 32:
            return
        assert time.monotonic() < deadline, f"no hit {MEND_LIMIT_S:g} s after the last outage"
        time.sleep(0.5)
