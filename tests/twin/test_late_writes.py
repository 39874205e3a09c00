"""A range that is written after the release time-out lands in somebody else's object; the connector writes none."""

from __future__ import annotations

from typing import Any

from tests.twin.layered import MIB, LayeredRank
from tests.twin.world import DISCARD_S, RELEASE_S, SEGMENT_BYTES, Memory, World, get, put

NEIGHBOURS = 27
"""With the abandoned objects more than the segment holds: some must lie where those lay."""


def damaged_neighbours(world: World, limit_s: float) -> int:
    """A step that hangs between its layers for longer than the release time-out; objects that it damaged."""
    world.client(SEGMENT_BYTES)
    other: Any = world.client()
    rank = LayeredRank(world, 2, layerwise_session_limit_s=limit_s)
    rank.fill(7)
    step = rank.begin_save()
    rank.worker.save_layer(rank.layers[0])
    rank.await_ranges(left=1)
    waiting = Memory(1)
    world.advance(DISCARD_S + 1.2)
    for key in rank.keys:
        assert put(other, key, waiting.value) == 0
    world.advance(2 * RELEASE_S + 3)
    values = {world.key(): bytes([i + 1]) * (2 * MIB) for i in range(NEIGHBOURS)}
    stored = {key: value for key, value in values.items() if put(other, key, value) == 0}
    rank.worker.save_layer(rank.layers[1])
    rank.end_save(step)
    damaged = 0
    for key, value in stored.items():
        code, found = get(other, key, 2 * MIB)
        damaged += code == 2 * MIB and found != value
    assert "save_blocks_stored" not in rank.counts()
    rank.worker.close()
    return damaged


def test_without_the_limit_neighbours_are_damaged(fresh_world: World) -> None:
    assert damaged_neighbours(fresh_world, 600.0) > 0


def test_nothing_is_written_after_the_limit(fresh_world: World) -> None:
    assert damaged_neighbours(fresh_world, DISCARD_S / 2) == 0
