"""Mistakes planted into the scheduler and worker sides, and the connector's own test that must catch each.

A test is named as `module:function` or `module:Class.method`, in `packages/connector/tests`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class WrongSide:
    """A mistake: `owner.name` is `wrong` instead of what it should be."""

    mistake: str
    owner: Any
    name: str
    wrong: Any
    caught_by: str
    arguments: dict[str, Any]

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the mistake."""
        monkeypatch.setattr(self.owner, self.name, self.wrong)


WRONG_SIDES: list[WrongSide] = []


def plant(mistake: str, owner: Any, name: str, wrong: Any, caught_by: str, **arguments: Any) -> None:
    """Enter another value of `owner.name` into the table."""
    WRONG_SIDES.append(WrongSide(mistake, owner, name, wrong, caught_by, arguments))


def wrap(mistake: str, owner: Any, name: str, wrong: Callable[..., Any], caught_by: str, **arguments: Any) -> None:
    """The same with a function whose first argument is the right one."""
    right = getattr(owner, name)
    plant(mistake, owner, name, lambda *a, **k: wrong(right, *a, **k), caught_by, **arguments)
