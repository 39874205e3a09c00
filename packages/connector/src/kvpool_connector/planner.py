"""From block ids to address lists: pure arithmetic on a layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool_connector.contract.layout import ShardLayout


class Planner:
    """Address and size lists of whole blocks, in object order.

    A block's addresses never change, so each list is computed once and kept: at most `layout.num_blocks` lists.
    """

    def __init__(self, layout: ShardLayout) -> None:
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
        self._num_blocks = layout.num_blocks
        self._addresses: dict[int, list[int]] = {}
        self.sizes = sizes
        """Bytes of each piece of a block, the same list for every block."""

    def addresses(self, block_ids: Sequence[int]) -> list[list[int]]:
        """For each block the addresses of its pieces, `len(sizes)` each.

        Raises `IndexError` for a block id outside the registered blocks: such an address would be somebody else's.
        """
        kept = self._addresses
        unseen = [block_id for block_id in block_ids if block_id not in kept]
        if unseen:
            if min(unseen) < 0 or max(unseen) >= self._num_blocks:
                raise IndexError(
                    f"block ids {min(unseen)}..{max(unseen)} asked for; registered are 0..{self._num_blocks - 1}"
                )
            ids = np.array(unseen, dtype=np.uint64)[:, None]
            kept.update(zip(unseen, (self._starts + ids * self._strides).tolist(), strict=True))
        return [kept[block_id] for block_id in block_ids]
