"""Checksums of objects: written behind the pages when a block is saved, compared when it is loaded."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from kvpool_connector.contract.device import CHECKSUM_BYTES, Checksums
from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.loudness import Loudness

logger = logging.getLogger(__name__)

MAX_TOLD = 16
"""Objects of one batch that are named in the log at DEBUG."""

SAMPLE_EVERY = {"on": 1, "sampled": 16}
"""By the setting `integrity`: of how many objects loaded one is compared. Every object carries its checksums."""


PAGE = 4096


def spacing(layout: ShardLayout) -> int:
    """Bytes from one object in a staging chunk to the next, where each has its checksums right behind its pages.

    So the store moves both as one piece. Whole pages, because copies to a place that begins elsewhere in its page than
    the source can be several times slower.
    """
    size = layout.object_bytes + CHECKSUM_BYTES * len(layout.components)
    return -(-size // PAGE) * PAGE


def component_names(layout: ShardLayout) -> list[str]:
    """The components of an object as people know them, in object order."""
    return [f"{layer.label}.{component.name}" for layer in layout.layers for component in layer.components]


class Integrity:
    """The checksums of one layout's objects in a staging chunk."""

    def __init__(self, checksums: Checksums, layout: ShardLayout, sample_every: int) -> None:
        self.trailer_bytes = CHECKSUM_BYTES * len(layout.components)
        """Bytes behind an object's pages."""
        self._checksums = checksums
        self._names = component_names(layout)
        self._sample_every = sample_every
        self._turns = itertools.count()
        self._loudness = Loudness()

    def part(self, checksums: Checksums, layout: ShardLayout) -> Integrity:
        """The checksums of some layers of the objects, by themselves: all that it is given are compared."""
        part = Integrity(checksums, layout, sample_every=1)
        part._loudness = self._loudness
        return part

    def sampled(self) -> bool:
        """Whether the object that is loaded next is compared."""
        return not next(self._turns) % self._sample_every

    def seal(self, objects: int, count: int, trailers: int) -> None:
        """Write the checksums of `count` objects at address `objects` to address `trailers`."""
        self._checksums.write(objects, count, trailers)

    def broken(self, keys: Sequence[str], loaded: Sequence[int], objects: int, trailers: int) -> list[int]:
        """Which of the `loaded` (indices into `keys` and into the objects) are not what was saved."""
        found = []
        for i in loaded:
            if not self.sampled():
                continue
            if wrong := self._checksums.differing(objects, i, trailers):
                found.append(i)
                if len(found) <= MAX_TOLD:
                    logger.debug("event=corrupt key=%s components=%s", keys[i], ",".join(self._names[k] for k in wrong))
        if found:
            first = self._checksums.differing(objects, found[0], trailers)
            logger.log(
                self._loudness.level("corrupt"),
                "event=corrupt_objects count=%d of=%d first=%s components=%s: removed, and computed instead",
                len(found),
                len(loaded),
                keys[found[0]],
                ",".join(self._names[k] for k in first[:8]),
            )
        return found
