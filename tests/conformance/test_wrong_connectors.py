"""Every planted mistake is caught by the test named for it; without the mistake the same test passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool_conformance import suites
from kvpool_connector.contract.errors import KVPoolError
from tests.conformance.wrong_connectors import WRONG_CONNECTORS, WrongConnector
from tests.targets.simulator import SimulatorTarget, simulator


@pytest.fixture(scope="module")
def target() -> Iterator[SimulatorTarget]:
    with simulator(512 << 20) as made:
        yield made


@pytest.mark.kvpool_teeth("wrong connectors")
@pytest.mark.parametrize("wrong", WRONG_CONNECTORS, ids=lambda wrong: wrong.mistake)
def test_the_mistake_is_caught(target: SimulatorTarget, wrong: WrongConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    test = getattr(getattr(suites, wrong.suite)(), wrong.caught_by)
    test(target, **wrong.arguments)
    with monkeypatch.context() as planted:
        wrong.patch(planted)
        # Some mistakes do not survive the connector's own checks at start.
        with pytest.raises((AssertionError, KVPoolError)):
            test(target, **wrong.arguments)


def test_there_are_enough() -> None:
    assert len(WRONG_CONNECTORS) >= 40
    assert len({wrong.mistake for wrong in WRONG_CONNECTORS}) == len(WRONG_CONNECTORS)
