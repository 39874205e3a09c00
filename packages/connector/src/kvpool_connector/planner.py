"""From block ids to address lists: pure arithmetic on a layout."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from kvpool_connector.contract.layout import ShardLayout

MAX_KEPT_ADDRESSES = 1 << 21
"""Bound of the addresses that one layout keeps; at about 40 bytes each, 84 MB."""


class Planner:
    """Addresses and sizes of whole blocks, in object order.

    A block's addresses never change, so they are computed once and kept, as a tuple: unlike a list, a tuple of numbers
    is looked at by the garbage collector once and then never again.
    """

    def __init__(self, layout: ShardLayout, max_kept_addresses: int = MAX_KEPT_ADDRESSES) -> None:
        starts: list[int] = []
        strides: list[int] = []
        sizes: list[int] = []
        for component in layout.components:
            for address, size in component.pieces(0):
                starts.append(address)
                strides.append(component.block_stride)
                sizes.append(size)
        # Device addresses may lie above 2**63, so the arithmetic is unsigned.
        self._starts = np.array(starts, dtype=np.uint64)
        self._strides = np.array(strides, dtype=np.uint64)
        self._row = struct.Struct(f"{len(starts)}Q")
        self._num_blocks = layout.num_blocks
        self._max_kept_blocks = max_kept_addresses // max(1, len(starts))
        self._kept: dict[int, tuple[int, ...]] = {}
        self.sizes = sizes
        """Bytes of each piece of a block, the same list for every block."""

    @property
    def num_kept_addresses(self) -> int:
        """Addresses that are kept now."""
        return len(self._kept) * len(self.sizes)

    def addresses(self, block_ids: Sequence[int]) -> list[tuple[int, ...]]:
        """For each block the addresses of its pieces, `len(sizes)` each.

        Raises `IndexError` for a block id outside the registered blocks: such an address would be somebody else's.
        """
        kept = self._kept
        try:
            return list(map(kept.__getitem__, block_ids))
        except KeyError:
            unseen = {block_id: () for block_id in block_ids if block_id not in kept}
        if min(unseen) < 0 or max(unseen) >= self._num_blocks:
            raise IndexError(
                f"block ids {min(unseen)}..{max(unseen)} asked for; registered are 0..{self._num_blocks - 1}"
            )
        ids = np.fromiter(unseen, dtype=np.uint64, count=len(unseen))[:, None]
        rows = dict(zip(unseen, self._row.iter_unpack((self._starts + ids * self._strides).tobytes()), strict=True))
        found = [rows[block_id] if block_id in rows else kept[block_id] for block_id in block_ids]
        if len(kept) + len(rows) > self._max_kept_blocks:
            # Begun anew instead of emptied: another thread may be reading the old ones.
            kept = self._kept = {}
        if len(rows) <= self._max_kept_blocks:
            kept.update(rows)
        return found
