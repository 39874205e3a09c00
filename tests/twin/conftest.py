"""Claims run in every requested world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import pytest

from kvpool_conformance.plugin import MARK
from tests.twin.world import SEGMENT_BYTES, World, real_world, simulated_world

WORLDS: dict[str, Callable[..., AbstractContextManager[World]]] = {"simulator": simulated_world, "mooncake": real_world}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Claims run on the requested targets that are stores."""
    for fixture, scope in (("world", "session"), ("fresh_world", "function"), ("make_world", "function")):
        if fixture in metafunc.fixturenames:
            names = list(metafunc.config.getoption("--kvpool-target")) or ["simulator"]
            parameters = [pytest.param(n, marks=getattr(pytest.mark, MARK)(n)) for n in names if n in WORLDS]
            metafunc.parametrize(fixture, parameters, indirect=True, scope=scope)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world with memory for everybody, and two clients `a` and `b` without."""
    with WORLDS[request.param]() as made:
        made.client(SEGMENT_BYTES)
        made.a, made.b = made.client(), made.client()  # type: ignore[attr-defined]
        yield made


@pytest.fixture
def fresh_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world of one test, without memory."""
    with WORLDS[request.param]() as made:
        yield made


@pytest.fixture
def make_world(request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    """Makes worlds of one test, whose masters have these flags."""
    with ExitStack() as stack:
        yield lambda **flags: stack.enter_context(WORLDS[request.param](**flags))
