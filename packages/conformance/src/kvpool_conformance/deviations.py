"""Known deviations of a target, strictly: each must still fail, and each must still name a test.

A file of lines `TARGET TEST REASON`; `TEST` is a test's name, with its parameters or without; empty lines and lines
that begin with `#` say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvpool_conformance.results import TARGET


@dataclass(frozen=True)
class Deviation:
    """One line of the file."""

    place: str
    target: str
    test: str
    reason: str

    def names(self, item: pytest.Item) -> bool:
        """Whether the item is this target's test."""
        mark = item.get_closest_marker(TARGET)
        target = mark.args[0] if mark else None
        return target == self.target and self.test in (item.name, getattr(item, "originalname", item.name))


def read(path: Path) -> Iterator[Deviation]:
    """The deviations in a file. Raises `pytest.UsageError` naming a line that says too little."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split(maxsplit=2)
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 3:
            raise pytest.UsageError(f"{path}:{number}: {line!r} is no deviation: expected TARGET TEST REASON")
        yield Deviation(f"{path}:{number}", *words)


def expect(path: Path, items: Sequence[pytest.Item]) -> None:
    """Mark what is known to fail; it is an error when it passes.

    Raises `pytest.UsageError` for an entry that names no test of a target that is judged.
    """
    judged = {mark.args[0] for item in items for mark in item.iter_markers(TARGET)}
    for deviation in read(path):
        named = [item for item in items if deviation.names(item)]
        if not named and deviation.target in judged:
            raise pytest.UsageError(
                f"{deviation.place}: {deviation.target} has no test {deviation.test!r}: remove the entry or correct it"
            )
        for item in named:
            item.add_marker(pytest.mark.xfail(reason=f"known deviation: {deviation.reason}", strict=True))
