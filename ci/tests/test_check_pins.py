"""Versions that are not pinned are seen."""

from __future__ import annotations

import pytest

from ci.check_pins import pins, unpinned


def test_as_pinned() -> None:
    assert unpinned({"Jinja2": "3.1.6", "torch": "2.13.0+cpu"}, pins("jinja2==3.1.6\ntorch==2.13.0  # CPU\n")) == []


def test_names_are_compared_as_packaging_does() -> None:
    assert unpinned({"typing_extensions": "4.16.0"}, pins("Typing.Extensions==4.16.0")) == []


@pytest.mark.parametrize("text", ["# nothing", "numpy==2.4.5"])
def test_missing_and_other_versions_are_seen(text: str) -> None:
    assert unpinned({"numpy": "2.4.6"}, pins(text)) == ["numpy==2.4.6"]


def test_our_own_packages_need_no_pin() -> None:
    assert unpinned({"kvpool_connector": "0.1.0"}, {}) == []


def test_a_range_is_no_pin() -> None:
    with pytest.raises(ValueError, match="line 2: 'numpy>=2' is no pin"):
        pins("torch==2.13.0\nnumpy>=2\n")
