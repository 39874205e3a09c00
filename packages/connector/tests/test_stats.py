"""Labels are bounded, and no two counts share one."""

from __future__ import annotations

import pytest

from kvpool_connector.counters import Counters
from kvpool_connector.stats import FAMILIES, Family, labelled


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_two_counts_share_a_label(family: Family) -> None:
    results = list(family.counts.values())
    assert len(set(results)) == len(results)


def test_unknown_names_make_no_labels() -> None:
    counts = {"load_blocks_ok": 3, "request-17": 1, "save_blocks_stored": 0}
    assert [(family.name, result, count) for family, result, count in labelled(counts)] == [
        ("kvpool_load_blocks", "ok", 3)
    ]


@pytest.mark.parametrize(
    "counts",
    [None, 3, "load_blocks_ok", [], {"load_blocks_ok": -3}, {"load_blocks_ok": None}, {"load_blocks_ok": "3"}],
    ids=str,
)
def test_e1_e3_what_is_no_growth_is_left_out_and_nothing_raises(counts: object) -> None:
    """A Prometheus counter raises when it is told to go down, in the engine's own step."""
    assert list(labelled(counts)) == []


def test_e1_counts_taken_are_never_negative() -> None:
    counters = Counters()
    for i in range(5):
        counters.add("a", i)
        counters.add("b")
        taken = counters.take()
        assert taken == ({"a": i, "b": 1} if i else {"b": 1})
    assert counters.take() == {}
    assert counters.totals() == {"a": 10, "b": 5}
