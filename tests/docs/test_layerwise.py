"""What the page on layers says was measured is what `bench/layerwise.json` has, and `auto` follows it."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from bench import layered_models
from bench.layerwise import COMPUTING, PAGE, RESULTS, points, written
from bench.measure import Row

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


MODELS: list[dict[str, Any]] = json.loads(layered_models.RESULTS.read_text(encoding="utf-8"))


def test_the_page_has_the_table_of_models() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert layered_models.written(page, MODELS) == page


def test_all_points_of_models_are_there() -> None:
    expected = [(deployed.name, blocks) for deployed in layered_models.MODELS for blocks in deployed.blocks]
    assert [(one["model"], one["blocks"]) for one in MODELS] == expected
    # Latent, rope and indexer; with C8 half an indexer and its scales; the small one.
    page_bytes = [131072 + 16384 + 32768] * 2 + [131072 + 16384 + 16384 + 256] * 2 + [4096 + 512 + 1024] * 3
    assert [one["object_bytes"] for one in MODELS] == [61 * size for size in page_bytes]


@pytest.mark.parametrize("row", layered_models.as_rows(MODELS), ids=lambda row: f"{row.what}-{row.against}")
def test_with_as_much_computing_layers_take_no_more_than_they_may(row: Row) -> None:
    assert row.at_most is None or row.median <= row.at_most, f"{row.median} is more than {row.at_most}"
