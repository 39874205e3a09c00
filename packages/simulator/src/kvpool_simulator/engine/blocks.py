"""The engine's blocks: reference counts, a queue of free ones, and which content is still in which block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

Content = tuple[int, bytes, str]
"""Group, block hash, and what keeps requests of equal hashes apart in the engine."""


class Block:
    """One block of the manager."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_users = 0
        self.content: Content | None = None

    @property
    def is_null(self) -> bool:
        """True for the block that stands where there is none."""
        return self.block_id == 0

    def __repr__(self) -> str:
        return f"Block({self.block_id})"


class BlockPool:
    """`num_blocks` blocks, of which block 0 is nobody's. Free blocks keep their content until they are given out again,
    the longest free first."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null = self.blocks[0]
        self._free: OrderedDict[int, Block] = OrderedDict((block.block_id, block) for block in self.blocks[1:])
        self._cached: dict[Content, Block] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[Block]:
        """`count` blocks for new content; the caller has looked that they are there."""
        taken = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            self.forget(block)
            block.num_users = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[Block]) -> None:
        """One more user of blocks that hold what it needs."""
        for block in blocks:
            if not block.is_null:
                self._free.pop(block.block_id, None)
                block.num_users += 1

    def give_back(self, blocks: Iterable[Block]) -> None:
        """One user less; the first given back is the first to be reused."""
        for block in blocks:
            if block.is_null:
                continue
            block.num_users -= 1
            assert block.num_users >= 0, f"{block} was given back more often than taken"
            if not block.num_users:
                self._free[block.block_id] = block

    def remember(self, block: Block, content: Content) -> None:
        """The block holds `content` (or will, when the step that was just planned has run)."""
        if block.content is None and content not in self._cached:
            block.content = content
            self._cached[content] = block

    def forget(self, block: Block) -> None:
        """The block holds nothing that anybody may count on."""
        if block.content is not None:
            del self._cached[block.content]
            block.content = None

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """The same by number, for connectors (vLLM: `BlockPool.evict_blocks`)."""
        for block_id in block_ids:
            self.forget(self.blocks[block_id])

    def find(self, content: Content) -> Block | None:
        """A block that holds `content`."""
        return self._cached.get(content)

    def forget_all(self) -> None:
        """Forget what free and used blocks hold."""
        for block in list(self._cached.values()):
            self.forget(block)
