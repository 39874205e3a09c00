"""One real master, tiny models, what an engine without a connector answers, and a pool that another engine filled."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.engine.engine import Engine, engine
from tests.engine.models import BLOCK_SIZE, LINEAR, NUM_LINEAR, SLIDING_WINDOW, make_model
from tests.engine.prompts import PROMPTS, poolable
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.targets.real_mooncake import RealMaster, real_master

LOGPROB_TOLERANCE = 1e-3
"""Computing a prompt whole or its end alone adds up in another order; a wrong block moves a logprob by far more."""
SHORT = {"max_model_len": 640, "max_num_batched_tokens": 128, "max_num_seqs": 64}
NUM_BLOCKS = {"gqa": 64, "mla": 128, "two-groups": 128}
"""Of an engine with a small cache: room for a few requests at once, not for 64."""


# Tiny models gain nothing from more threads, and engines that wait for each other's threads lose much.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", type=float, default=30, help="how long test_soak goes on")
    parser.addoption("--soak-seed", type=int, default=1, help="what happens in test_soak")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("models")
    return lambda kind: make_model(kind, directory)


@pytest.fixture(scope="session")
def master() -> Iterator[RealMaster]:
    with real_master(512 << 20, lease_s=5) as made:
        yield made


@pytest.fixture(scope="session")
def spec(
    models: Callable[[str], Path], master: RealMaster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., EngineSpec]:
    """An engine of a kind with the pool. Without a namespace it shares with all that name none."""
    config = write_mooncake_json(tmp_path_factory.mktemp("config") / "mooncake.json", master.address)

    def make(
        kind: str, namespace: str | None = None, extra: dict[str, object] | None = None, **more: object
    ) -> EngineSpec:
        assert master.process is not None
        code = master.process.poll()
        assert code is None, f"the master of all tests has ended with {code}: no test with it can go on"
        named = {} if namespace is None else {"namespace": namespace}
        options = {"block_size": BLOCK_SIZE[kind], "mooncake_json": config, **more}
        return EngineSpec(models(kind), pool={**named, **(extra or {})}, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def running() -> Iterator[Callable[[EngineSpec], Engine]]:
    """Engines that live as long as the tests, one of a kind; at rest when they are handed out and at their end."""
    with ExitStack() as stack:
        known: list[tuple[EngineSpec, Engine]] = []

        def get(made: EngineSpec) -> Engine:
            for other, one in known:
                if other == made:
                    one.forget()
                    return one
            known.append((made, stack.enter_context(engine(made))))
            return known[-1][1]

        yield get


@pytest.fixture(scope="session")
def plain(models: Callable[[str], Path], running: Callable[[EngineSpec], Engine]) -> Callable[[str], Engine]:
    """The engine of a kind without a connector: what is right."""
    return lambda kind: running(EngineSpec(models(kind), BLOCK_SIZE[kind]))


@pytest.fixture(scope="session")
def baseline(plain: Callable[[str], Engine]) -> Callable[[str], list[Answer]]:
    """What an engine without a connector answers to `PROMPTS`; computed once a kind."""
    return cache(lambda kind: plain(kind).generate(PROMPTS))


@pytest.fixture(scope="session")
def pooled(
    spec: Callable[..., EngineSpec],
    running: Callable[[EngineSpec], Engine],
    baseline: Callable[[str], list[Answer]],
) -> Callable[..., Engine]:
    """The engine of a kind with the pool, and with `PROMPTS` in the pool only.

    Its own cache is small, and it computes a prompt in several steps. `between`: it loads between steps, piece by
    piece, what the other has saved packed.
    """
    known: set[tuple[str, bool]] = set()

    def get(kind: str, between: bool = False) -> Engine:
        way = {"load_async": True, "transfer": "direct"} if between else {}
        made = spec(kind, extra={"save_decode_cache": True, **way}, num_blocks=NUM_BLOCKS[kind], arguments=SHORT)
        one = running(made)
        if (kind, between) not in known:
            assert_same(one.generate(PROMPTS), baseline(kind))
            one.forget()
            known.add((kind, between))
        return one

    return get


@pytest.fixture(scope="session")
def filled(spec: Callable[..., EngineSpec], pooled: Callable[..., Engine]) -> Callable[[str], EngineSpec]:
    """An engine of a kind with a pool that another such engine has filled with `PROMPTS`."""

    def make(kind: str) -> EngineSpec:
        pooled(kind)
        return spec(kind)

    return make


def assert_fills_and_answers_from(one: Engine, expected: Sequence[Answer], num_blocks: int) -> None:
    """An engine computes `PROMPTS` and, without its own cache, answers them from the pool, which is empty before.

    `num_blocks`: objects to read, over all ranks and groups.
    """
    answers = one.generate(PROMPTS)
    assert_same(answers, expected)
    assert [answer.num_cached_tokens for answer in answers] == [0] * len(PROMPTS)
    assert loads(one.counts()) == {}
    one.forget()
    assert_answered_from_pool(one, expected, num_blocks)


def assert_answered_from_pool(one: Engine, expected: Sequence[Answer], num_blocks: int) -> None:
    """An engine answers `PROMPTS` with the same tokens, and takes from the pool exactly what it has.

    `num_blocks`: objects to read, over all ranks and groups.
    """
    before = one.counts()
    answers = one.generate(PROMPTS)
    assert_same(answers, expected)
    assert [answer.num_cached_tokens for answer in answers] == poolable(one.spec.block_size)
    counts = Counter(one.counts())
    counts.subtract(before)
    assert counts["lookup_hit_tokens"] == sum(poolable(one.spec.block_size))
    assert +Counter(loads(counts)) == {"load_blocks_ok": num_blocks}


def loads(counts: Mapping[str, int]) -> dict[str, int]:
    """Blocks that were to be loaded, by how that ended."""
    return {name: count for name, count in counts.items() if name.startswith("load_blocks")}


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The same tokens, as probable as expected."""
    assert tokens(answers) == tokens(expected)
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=LOGPROB_TOLERANCE)


def tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    """The tokens alone."""
    return [answer.tokens for answer in answers]


def num_objects(kind: str, block_size: int) -> int:
    """Objects that an engine of one rank reads for `PROMPTS`: of windows and states only what computing on needs."""
    blocks = [hit // block_size for hit in poolable(block_size)]
    if kind == LINEAR:
        # Of each layer with states only the last one is read.
        return sum(blocks) + NUM_LINEAR * sum(count > 0 for count in blocks)
    if kind != "two-groups":
        return sum(blocks)
    # The token at the boundary sees itself and the window's others before it.
    reached = -(-(SLIDING_WINDOW - 1) // block_size)
    return sum(blocks) + sum(min(count, reached) for count in blocks)
