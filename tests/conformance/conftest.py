"""Targets by name, and one backend of each for the tests of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from kvpool_conformance.plugin import MARK, not_run
from tests.targets.npu import npu, npu_stand_in, unreachable
from tests.targets.real_mooncake import mooncake
from tests.targets.simulator import simulator
from tests.targets.target import Target

TARGETS: dict[str, Callable[[], AbstractContextManager[Target]]] = {
    "simulator": simulator,
    "mooncake": mooncake,
    "npu": npu,
    "npu-stand-in": npu_stand_in,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that takes a backend runs on every requested target."""
    if "backend" not in metafunc.fixturenames:
        return
    names = list(metafunc.config.getoption("--kvpool-target")) or ["simulator"]
    for name in metafunc.config.getoption("--kvpool-if-there"):
        reason = unreachable() if name == "npu" else ""
        if reason:
            not_run(metafunc.config, name, reason)
        else:
            names.append(name)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise pytest.UsageError(f"--kvpool-target {unknown[0]!r} is unknown; expected one of {sorted(TARGETS)}")
    parameters = [pytest.param(name, marks=getattr(pytest.mark, MARK)(name)) for name in names]
    metafunc.parametrize("backend", parameters, indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The target; one that cannot be reached is an error."""
    with TARGETS[request.param]() as target:
        yield target
