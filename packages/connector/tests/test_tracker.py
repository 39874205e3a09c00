"""A request's tables, and what a group must have to go on at a boundary."""

from __future__ import annotations

import pytest

from kvpool_connector.tracker import GroupRule, RequestTracker, RequestView


@pytest.mark.parametrize(
    ("window", "boundary", "first"),
    [(None, 160, 0), (31, 160, 8), (32, 160, 8), (33, 160, 7), (1, 160, 9), (400, 160, 0), (15, 16, 0), (16, 17, 0)],
)
def test_the_first_block_that_is_read_from_a_boundary_on(window: int | None, boundary: int, first: int) -> None:
    assert GroupRule(16, window).first_needed(boundary) == first


def test_a_window_of_single_tokens() -> None:
    assert [GroupRule(1, 2).first_needed(boundary) for boundary in range(5)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("rule", "start", "end", "first"),
    [
        (GroupRule(16), 40, 80, 0),
        (GroupRule(16, 39), 40, 80, 2),
        (GroupRule(16, 1, state=True), 0, 80, 4),
        (GroupRule(16, 1, state=True), 40, 80, 4),
        (GroupRule(16, 1, state=True), 79, 80, 4),
        (GroupRule(16, 1, state=True), 0, 79, 5),
        (GroupRule(16, 1, state=True), 79, 81, 6),
    ],
)
def test_the_first_block_that_is_certain_after_a_step(rule: GroupRule, start: int, end: int, first: int) -> None:
    assert rule.first_certain(start, end) == first


def test_tables_grow_and_start_over_together() -> None:
    tracker = RequestTracker(RequestView("r", 40, 40, []), [[1], [None]])
    tracker.append_blocks([[2, 3], [4]])
    assert tracker.block_ids == [[1, 2, 3], [None, 4]]
    tracker.num_saved = [2, 1]
    tracker.replace_blocks([[5], [6]])
    assert (tracker.block_ids, tracker.num_saved) == ([[5], [6]], [0, 0])


@pytest.mark.parametrize("blocks", [[[1]], [[1], [2], [3]]])
def test_blocks_of_another_number_of_groups_are_a_mistake(blocks: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="argument"):
        RequestTracker(RequestView("r", 1, 1, []), [[], []]).append_blocks(blocks)
