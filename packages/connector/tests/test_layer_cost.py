"""The model of when layers pay; that it is right at what was measured is tested with the documentation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool_connector.layer_cost import Work, best_num_ranges, layers_s, pays, whole_s

V32_BYTES = 61 * (131072 + 16384 + 32768)


def v32(num_blocks: int, num_ranges: int = 14) -> Work:
    return Work(num_blocks, V32_BYTES, num_ranges)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ([v32(8)], True),
        ([v32(16)], True),
        ([v32(16, num_ranges=1)], False),
        ([Work(1, 4096, 3)], False),
        ([Work(1024, 61 * 256, 61)], False),
        ([v32(16), Work(16, 4096, 1)], True),
        ([], False),
    ],
)
def test_large_objects_in_several_ranges_pay(work: list[Work], expected: bool) -> None:
    assert pays(work) is expected


def test_checksums_are_a_range_that_no_computing_covers() -> None:
    assert pays([replace(v32(16), checksums=True)])
    # Where layers hardly pay, one range more is too much.
    least = min(size for size in range(100_000, 2_000_000, 1000) if pays([Work(8, size, best_num_ranges(size))]))
    assert not pays([Work(8, least, best_num_ranges(least), checksums=True)])


def test_with_nothing_to_compute_ranges_cost_more() -> None:
    for num_ranges in (1, 3, 61):
        assert layers_s([v32(16, num_ranges)]) < layers_s([v32(16, num_ranges + 1)])
    assert whole_s([v32(16)]) < layers_s([v32(16)])


@pytest.mark.parametrize(
    ("object_bytes", "expected"), [(256, 1), (100_000, 1), (250_000, 2), (2_000_000, 6), (V32_BYTES, 14)]
)
def test_ranges_grow_with_the_object(object_bytes: int, expected: int) -> None:
    assert best_num_ranges(object_bytes) == expected


def test_the_best_number_of_ranges_is_the_best_of_the_model() -> None:
    def time(num_ranges: int) -> float:
        # A pipeline of moving and computing, as long as each other.
        moving = layers_s([Work(1000, V32_BYTES, num_ranges)])
        return moving + moving / num_ranges

    assert abs(min(range(1, 62), key=time) - best_num_ranges(V32_BYTES)) <= 1
