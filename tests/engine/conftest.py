"""One real master, tiny models, and baselines from an engine without a connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.engine import Answer, EngineSpec, engine, write_mooncake_json
from tests.engine.models import BLOCK_SIZE, make_model
from tests.targets.real_mooncake import RealMaster, real_master

PROMPTS = [[(i * 7 + j * j) % 250 for j in range(length)] for i, length in enumerate((200, 320, 33, 20, 129))]
"""Lengths around block boundaries: one more than full blocks, exactly full blocks, less than one block."""


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
    """An engine of a kind with the pool; every test gives a namespace of its own."""
    config = write_mooncake_json(tmp_path_factory.mktemp("config") / "mooncake.json", master.address)

    def make(kind: str, namespace: str, extra: dict[str, object] | None = None, **more: object) -> EngineSpec:
        options = {"block_size": BLOCK_SIZE[kind], "mooncake_json": config, **more}
        return EngineSpec(models(kind), pool={"namespace": namespace, **(extra or {})}, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def baseline(models: Callable[[str], Path]) -> Callable[[str], list[Answer]]:
    """What an engine without a connector answers to `PROMPTS`; computed once a kind."""
    known: dict[str, list[Answer]] = {}

    def answers(kind: str) -> list[Answer]:
        if kind not in known:
            with engine(EngineSpec(models(kind), BLOCK_SIZE[kind])) as plain:
                known[kind] = plain.generate(PROMPTS)
        return known[kind]

    return answers


def tokens(answers: list[Answer]) -> list[tuple[int, ...]]:
    """The tokens alone."""
    return [answer.tokens for answer in answers]


def poolable(block_size: int) -> list[int]:
    """Tokens of each of `PROMPTS` that a full pool gives: whole blocks, with a token left to compute."""
    return [(len(prompt) - 1) // block_size * block_size for prompt in PROMPTS]
