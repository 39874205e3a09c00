"""Byte ranges as sorted arrays: join them, and find what lies between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
Intervals = tuple[Offsets, Offsets]
"""`(starts, ends)`, each `(n,)`; range i is `[starts[i], ends[i])`."""


def merge(starts: Offsets, ends: Offsets) -> Intervals:
    """Sort ranges and join those that overlap or touch. Empty ranges vanish."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if len(starts) == 0:
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate(([True], starts[1:] > ends[:-1]))
    last = np.concatenate((first[1:], [True]))
    return starts[first], ends[last]


def complement(starts: Offsets, ends: Offsets, low: int, high: int) -> Intervals:
    """What `[low, high)` holds beside the given ranges."""
    starts, ends = merge(np.clip(starts, low, high), np.clip(ends, low, high))
    gap_starts = np.concatenate((np.array([low], np.int64), ends))
    gap_ends = np.concatenate((starts, np.array([high], np.int64)))
    keep = gap_ends > gap_starts
    return gap_starts[keep], gap_ends[keep]


def runs(positions: Offsets) -> Intervals:
    """Runs of successive numbers in sorted `positions`."""
    return merge(positions, positions + 1)
