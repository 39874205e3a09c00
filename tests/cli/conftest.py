"""Every command runs against every requested target."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from kvpool_conformance.plugin import MARK
from tests.cli.pool import POOLS, Pool

_numbers = itertools.count()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The simulated store unless told otherwise."""
    if "pool" in metafunc.fixturenames:
        names = list(metafunc.config.getoption("--kvpool-target")) or ["simulator"]
        parameters = [pytest.param(n, marks=getattr(pytest.mark, MARK)(n)) for n in names if n in POOLS]
        metafunc.parametrize("pool", parameters, indirect=True, scope="session")


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool with memory; each test has a namespace of its own."""
    with POOLS[request.param]() as made:
        yield made


@pytest.fixture
def namespace() -> str:
    """A name that needs escaping, and that another one begins with."""
    return f"team a/{next(_numbers)}"


@pytest.fixture
def foreign(pool: Pool, namespace: str) -> Iterator[str]:
    """A foreign object under our prefix, in the test's namespace."""
    key = f"kvpool1/{namespace.replace(' ', '%20').replace('/', '%2F')}/0/not-a-fingerprint"
    assert pool.store.write(key, b"somebody else's").ok
    yield key
    pool.store.remove([key], force=True)
