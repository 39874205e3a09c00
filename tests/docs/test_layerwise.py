"""What the page on layers says was measured is what `bench/layerwise.json` has, and `auto` follows it."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from bench.layerwise import COMPUTING, PAGE, RESULTS, V32_PAGE_BYTES, points, written

from kvpool_connector.layer_cost import Work, best_num_ranges, pays

MEASURED: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
REMOTE = [one for one in MEASURED if one["place"] == "remote"]
TOLERANCE = 1.15
"""Of a point measured on a machine with other load."""


def least_ms(one: dict[str, Any], way: str) -> float:
    """Loading and saving, with and without computing."""
    return sum(one[what][computing][way]["least"] for what in ("load", "save") for computing in COMPUTING)


def chosen(one: dict[str, Any]) -> str:
    """What `auto` takes at a point."""
    layers, object_bytes = one["layers"], one["layers"] * one["page_bytes"]
    per_range = -(-layers // best_num_ranges(object_bytes))
    return "layers" if pays([Work(one["blocks"], object_bytes, -(-layers // per_range))]) else "packed"


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, MEASURED) == page


@pytest.mark.parametrize("place", ["remote", "local"])
def test_all_points_are_there(place: str) -> None:
    found = [(one["layers"], one["blocks"], one["page_bytes"]) for one in MEASURED if one["place"] == place]
    assert found == points()


@pytest.mark.parametrize("one", REMOTE, ids=lambda one: f"{one['layers']}x{one['blocks']}x{one['page_bytes']}")
def test_auto_takes_the_better_way(one: dict[str, Any]) -> None:
    best = min(least_ms(one, "packed"), least_ms(one, "layers"))
    assert least_ms(one, chosen(one)) <= TOLERANCE * best


def test_auto_is_never_much_slower_than_whole_blocks() -> None:
    for one in REMOTE:
        assert least_ms(one, chosen(one)) <= 1.1 * least_ms(one, "packed"), one


def test_auto_is_no_constant() -> None:
    assert {chosen(one) for one in REMOTE} == {"packed", "layers"}
    for way in ("packed", "layers"):
        # Always the same way would be found out.
        assert any(
            least_ms(one, way) > TOLERANCE * min(map(least_ms, [one] * 2, ("packed", "layers"))) for one in REMOTE
        )


def test_beside_memory_of_its_own_layers_seldom_gain() -> None:
    local = [one for one in MEASURED if one["place"] == "local"]
    assert statistics.median(least_ms(one, "layers") / least_ms(one, "packed") for one in local) > TOLERANCE


@pytest.mark.parametrize("what", ["load", "save"])
@pytest.mark.parametrize("blocks", [8, 16])
def test_with_as_much_computing_large_objects_gain(what: str, blocks: int) -> None:
    (one,) = [one for one in REMOTE if one["page_bytes"] == V32_PAGE_BYTES and one["blocks"] == blocks]
    medians = {way: time["median"] for way, time in one[what]["equal"].items()}
    assert medians["layers"] <= 0.7 * medians["packed"]
    assert medians["layers"] <= 0.6 * medians["direct"]
