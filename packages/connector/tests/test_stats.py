"""Labels are bounded, and no two counts share one."""

from __future__ import annotations

import pytest

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
