"""The bytes that contents are made of."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool_simulator.device.content import stream


def test_parts_are_told_apart_by_kind_and_by_where_they_end() -> None:
    parts: list[tuple[bytes | str | int, ...]] = [("ab", "c"), ("a", "bc"), (b"ab", "c"), ("1",), (1,), (b"1",), ()]
    assert len({stream(16, *some).tobytes() for some in parts}) == len(parts)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4_096])
def test_a_shorter_stream_is_a_prefix(size: int) -> None:
    assert stream(size, "x").tobytes() == stream(8_192, "x").tobytes()[:size]


def test_a_stream_does_not_depend_on_the_run() -> None:
    assert stream(11, "a", b"a", 1).tobytes().hex() == "df2895e960db286817efa9"


def test_a_long_stream_does_not_repeat_and_looks_random() -> None:
    words = stream(6 << 20, "long").view(np.uint64)
    assert len(np.unique(words)) == len(words)
    counts = np.bincount(words.view(np.uint8), minlength=256)
    assert abs(counts / counts.mean() - 1).max() < 0.05
