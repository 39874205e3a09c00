"""Addresses of blocks, against the layout's own arithmetic; bounds."""

from __future__ import annotations

import gc

import pytest

from kvpool_connector.contract.layout import Component, Layer, ShardLayout
from kvpool_connector.planner import Planner

HIGH = 0xFFFF_8000_0000_0000
"""Device addresses may lie above 2**63."""
COMPONENTS = (
    Component("k", "bfloat16", (16, 1, 4), "NHD", HIGH, 4096, 128),
    Component("v", "bfloat16", (16, 1, 4), "NHD", 1 << 20, 512, 64, num_pieces=2, piece_stride=256),
)
LAYOUT = ShardLayout(0, 16, 8, (Layer("0", ("layer",), COMPONENTS),))


def pieces(block_id: int) -> list[int]:
    return [address for component in COMPONENTS for address, _ in component.pieces(block_id)]


def test_addresses_and_sizes_are_the_layouts() -> None:
    planner = Planner(LAYOUT)
    assert list(planner.sizes) == [128, 64, 64]
    for asked in ([3], [0, 7, 3], [3, 3, 1], []):
        assert [list(found) for found in planner.addresses(asked)] == [pieces(block_id) for block_id in asked]


@pytest.mark.parametrize("asked", [[8], [0, 8], [-1], [2, -1], [9, 1]])
def test_a_block_that_is_not_registered_has_no_address(asked: list[int]) -> None:
    planner = Planner(LAYOUT)
    with pytest.raises(IndexError, match=rf"block ids {min(asked)}\.\.{max(asked)} asked for; registered are 0\.\.7"):
        planner.addresses(asked)
    assert [list(found) for found in planner.addresses([7])] == [pieces(7)]


def test_what_is_kept_is_bounded_and_right_beyond_the_bound() -> None:
    planner = Planner(LAYOUT, max_kept_addresses=3 * 4)
    for asked in ([0, 1, 2], [3, 0], [4, 5, 6, 7], [2, 3, 4, 5, 6], [5, 1]):
        assert [list(found) for found in planner.addresses(asked)] == [pieces(block_id) for block_id in asked]
        assert planner.num_kept_addresses <= 12
    assert planner.num_kept_addresses > 0


@pytest.mark.parametrize("at_once", [True, False])
def test_as_many_blocks_are_kept_as_have_room(at_once: bool) -> None:
    planner = Planner(LAYOUT, max_kept_addresses=3 * len(pieces(0)))
    for asked in [[0, 1, 2]] if at_once else [[0], [1], [2]]:
        planner.addresses(asked)
    assert planner.num_kept_addresses == 3 * len(pieces(0))


def test_addresses_seen_before_are_the_same_objects_and_none_of_the_garbage_collectors() -> None:
    planner = Planner(LAYOUT)
    first = planner.addresses([1, 2])
    gc.collect()
    assert all(again is found for again, found in zip(planner.addresses([1, 2]), first, strict=True))
    assert not any(gc.is_tracked(found) for found in first)
