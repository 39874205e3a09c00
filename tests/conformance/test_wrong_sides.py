"""Every mistake planted into the scheduler and worker sides is caught by the test named for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from kvpool_connector.contract.errors import KVPoolError

# These enter their mistakes into the table.
from tests.conformance import wrong_integrity, wrong_schedulers, wrong_workers  # noqa: F401
from tests.conformance.wrong_sides import WRONG_SIDES, WrongSide


def named(test: str) -> Callable[..., None]:
    """A test of the connector, to be called."""
    module, _, name = test.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found() if isinstance(found, type) else found, part)
    return found  # type: ignore[return-value]


@pytest.mark.kvpool_teeth("wrong connectors")
@pytest.mark.parametrize("wrong", WRONG_SIDES, ids=lambda wrong: wrong.mistake)
def test_the_mistake_is_caught(wrong: WrongSide, monkeypatch: pytest.MonkeyPatch) -> None:
    test = named(wrong.caught_by)
    test(**wrong.arguments)
    with monkeypatch.context() as planted:
        wrong.plant(planted)
        with pytest.raises((AssertionError, KVPoolError, LookupError)):
            test(**wrong.arguments)


def test_mistakes_are_told_apart() -> None:
    assert len({wrong.mistake for wrong in WRONG_SIDES}) == len(WRONG_SIDES) >= 50
