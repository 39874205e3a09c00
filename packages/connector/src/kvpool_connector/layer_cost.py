"""When moving a step's blocks layer by layer pays: a model of the times that both ways took.

The numbers are fitted to `bench/layerwise.json`: real Mooncake over TCP, memory in another process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

COMPUTING_OF_TRANSFER = 0.5
"""Assumed computing of a step, as a part of the time of moving its blocks whole. More only adds to what layers gain."""

CALL_S = 1.4e-4
"""Seconds of a range's call beside its blocks."""
BYTE_S = 6.5e-10
"""Seconds of moving one byte."""
RANGE_S = 3.6e-5
"""Seconds that one more range of a block costs: as much as moving 55 KB more."""


@dataclass(frozen=True)
class Work:
    """One group's blocks of a step."""

    num_blocks: int
    object_bytes: int
    num_ranges: int
    """Ranges that a block is moved in, layer by layer."""
    checksums: bool = False
    """Whether its object carries checksums: a range more, read before the first layer and written after the last."""


def whole_s(work: Sequence[Work]) -> float:
    """Seconds of moving blocks whole, through staging."""
    return sum(5.1e-4 + 5.1e-5 * one.num_blocks + BYTE_S * one.num_blocks * one.object_bytes for one in work)


def layers_s(work: Sequence[Work]) -> float:
    """Seconds of moving blocks range by range, with nothing to compute meanwhile."""
    return sum(
        4.4e-4
        + 3.3e-5 * one.num_blocks
        + one.num_ranges * (CALL_S + RANGE_S * one.num_blocks)
        + BYTE_S * one.num_blocks * one.object_bytes
        for one in work
    )


def pays(work: Sequence[Work]) -> bool:
    """True when a step that moves these blocks range by range ends earlier than one that moves them whole."""
    whole, layers = whole_s(work), layers_s(work)
    computing = COMPUTING_OF_TRANSFER * whole
    num_ranges = max((one.num_ranges for one in work), default=1)
    # A pipeline of two stages: the shorter one shows at one end only. No computing goes on beside the checksums' range.
    sums = sum(CALL_S + RANGE_S * one.num_blocks for one in work if one.checksums)
    return max(layers, computing) + min(layers, computing) / num_ranges + sums < whole + computing


def best_num_ranges(object_bytes: int) -> int:
    """In how many ranges a block of this size is moved best, where computing takes as long as moving.

    At the ends of a step, moving a range has nothing to overlap with: the more ranges, the less is lost there, but each
    costs `RANGE_S`. The sum is least at the root of the quotient.
    """
    return max(1, round(math.sqrt(object_bytes * BYTE_S / RANGE_S)))
