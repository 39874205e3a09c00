"""Blocks that went to a save a moment ago, and so need not be handed over again when the engine finds them itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvpool_connector.contract.clock import Clock

SAVE_MEMORY_S = 30.0
"""How long a block that went to a save is taken to be in the pool: requests that find it in the engine's own cache
do not ask the store for it. Where the save failed, a request after that hands it over again."""
MAX_REMEMBERED = 65536
"""Blocks, about; some 20 MB."""


class Scope(NamedTuple):
    """Where a block hash stands for one content."""

    epoch: int
    group: int
    tag: str


class RecentSaves:
    """Remembers each block for `SAVE_MEMORY_S`, or a shorter time where more than `MAX_REMEMBERED` go to saves in it.

    In two halves, of which the older is forgotten as a whole: a step notes a thousand blocks and more.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newer: defaultdict[Scope, dict[bytes, float]] = defaultdict(dict)
        """When each is forgotten."""
        self._older = self._newer
        self._num_noted = 0
        """Since the newer half began."""
        self._forgotten_at = 0.0
        """When all of the newer half is."""
        self._turn_at = 0.0

    def note(self, scope: Scope, block_hashes: Sequence[bytes]) -> None:
        """These go to a save now."""
        now = self._clock.now()
        if now >= self._turn_at or self._num_noted >= MAX_REMEMBERED // 2:
            self._older = self._newer if now < self._forgotten_at else defaultdict(dict)
            self._newer = defaultdict(dict)
            self._num_noted, self._turn_at = 0, now + SAVE_MEMORY_S
        self._forgotten_at = now + SAVE_MEMORY_S
        self._newer[scope].update(dict.fromkeys(block_hashes, self._forgotten_at))
        self._num_noted += len(block_hashes)

    def knows(self, scope: Scope, block_hash: bytes) -> bool:
        """Whether this block went to a save a moment ago."""
        now = self._clock.now()
        return any(half[scope].get(block_hash, now) > now for half in (self._newer, self._older) if scope in half)

    def __len__(self) -> int:
        return sum(len(blocks) for half in (self._newer, self._older) for blocks in half.values())
