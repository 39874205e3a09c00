"""Every known mistake of a store is caught by the test named for it, and by nothing in a right store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpool_conformance.suites import StoreConformance
from kvpool_connector.contract.store import Store
from tests.conformance.wrong_stores import WRONG_STORES, WrongStore
from tests.targets.simulator import SimulatorTarget, simulator


class WrongBackend:
    """A right target whose stores are wrapped."""

    def __init__(self, target: SimulatorTarget, wrong: WrongStore) -> None:
        self._target, self._wrong = target, wrong
        self.name, self.lease_s = "wrong", target.lease_s
        self.peek, self.poke, self.advance = target.peek, target.poke, target.advance

    @contextmanager
    def open(self) -> Iterator[Store]:
        with self._target.open() as store:
            made = self._wrong.make(store)
            yield made
            made.close()


@pytest.fixture(scope="module")
def target() -> Iterator[SimulatorTarget]:
    with simulator(256 << 20) as made:
        yield made


@pytest.mark.kvpool_teeth("wrong stores")
@pytest.mark.parametrize("wrong", WRONG_STORES, ids=lambda wrong: wrong.mistake)
def test_the_mistake_is_caught(target: SimulatorTarget, wrong: WrongStore) -> None:
    test = getattr(StoreConformance(), wrong.caught_by)
    test(target, **wrong.arguments)
    with pytest.raises((AssertionError, KeyError)):
        test(WrongBackend(target, wrong), **wrong.arguments)


def test_there_are_enough() -> None:
    assert len(WRONG_STORES) >= 25
    assert len({wrong.mistake for wrong in WRONG_STORES}) == len(WRONG_STORES)
