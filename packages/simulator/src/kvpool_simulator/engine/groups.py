"""KV cache groups: layers that share a block table, and the tables of all requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool_simulator.engine.blocks import Block, BlockPool, Content
from kvpool_simulator.engine.request import Request


@dataclass(frozen=True)
class Group:
    """One KV cache group as the scheduler sees it."""

    layer_names: tuple[str, ...]
    block_size: int
    """Tokens of one block on one rank."""
    sliding_window: int | None = None
    """Tokens that a token sees, itself included; None for all."""
    cp_size: int = 1
    state: bool = False
    """A block holds a state that stands for all tokens before its end; only the last is kept (vLLM: mamba, align)."""

    @property
    def tokens(self) -> int:
        """Tokens of one block over all context-parallel ranks."""
        return self.block_size * self.cp_size

    def num_skipped(self, num_tokens: int) -> int:
        """Leading tokens that computing on from `num_tokens` does not read."""
        if self.state:
            return max(0, num_tokens - 1)
        return 0 if self.sliding_window is None else max(0, num_tokens - self.sliding_window + 1)


class Tables:
    """Block tables by request and group over one pool (vLLM: `v1/core/kv_cache_manager.py`)."""

    def __init__(self, groups: Sequence[Group], pool: BlockPool, hash_block_size: int, caching: bool = True) -> None:
        self.groups = groups
        self.pool = pool
        self.caching = caching
        self.alignment = math.lcm(*(group.tokens for group in groups))
        self._hash_block_size = hash_block_size
        self._tables: dict[str, list[list[Block]]] = {}
        self._num_cached: dict[str, list[int]] = {}
        self._written_now: set[Block] = set()

    def begin_step(self) -> None:
        """A step is planned: what it computes may be hit while it is, but its states only when it is behind."""
        self._written_now.clear()

    def clip(self, request: Request, start: int, num_new: int, largest: int) -> int:
        """So many of `num_new` tokens of a prompt that the step ends where a state may be kept; 0 for none now.

        `largest`: tokens of a request in any step. (vLLM: `_mamba_block_aligned_split`.)
        """
        prompt_end = max(request.num_prompt_tokens, request.num_tokens - 1)
        if start >= prompt_end or not any(group.state for group in self.groups):
            return num_new
        size, end = self.alignment, start + num_new
        if end < prompt_end:
            whole = end // size * size
            if whole > start or size <= largest:
                end = whole
        stops = ((start // size + 1) * size if start % size else 0, (request.num_tokens - 1) // size * size)
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)

    def of(self, request_id: str) -> list[list[Block]]:
        """The request's blocks by group and index."""
        return self._tables.get(request_id) or [[] for _ in self.groups]

    def ids(self, request_id: str) -> list[list[int]]:
        """The same as block ids; 0 where there is no block."""
        return [[block.block_id for block in table] for table in self.of(request_id)]

    @property
    def num_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._tables)

    def hit(self, request: Request) -> tuple[list[list[Block]], int]:
        """Blocks by group that hold the request's longest prefix, and its tokens; one token is left to compute."""
        empty: list[list[Block]] = [[] for _ in self.groups]
        if not self.caching:
            return empty, 0
        limit = min(request.num_tokens - 1, len(request.block_hashes) * self._hash_block_size)
        boundary = limit // self.alignment * self.alignment
        while boundary:
            found = self._blocks_at(request, boundary)
            if found is not None:
                return found, boundary
            boundary -= self.alignment
        return empty, 0

    def _blocks_at(self, request: Request, boundary: int) -> list[list[Block]] | None:
        tables = []
        for number, group in enumerate(self.groups):
            first = group.num_skipped(boundary) // group.tokens
            table = [self.pool.null] * first
            for index in range(first, boundary // group.tokens):
                block = self.pool.find(self._content(request, number, index))
                if block is None or block in self._written_now:
                    return None
                table.append(block)
            tables.append(table)
        return tables

    def _content(self, request: Request, number: int, index: int) -> Content:
        end = (index + 1) * self.groups[number].tokens // self._hash_block_size
        # vLLM's hashes do not tell an adapter from a salt of the same name; this engine is not the one to be tested.
        return number, request.block_hashes[end - 1], request.isolation

    def allocate(
        self,
        request: Request,
        num_new: int,
        local: Sequence[Sequence[Block]] | None = None,
        num_local: int = 0,
        num_external: int = 0,
        lookahead: int = 0,
        remember: bool = True,
        reserved: int = 0,
    ) -> list[list[Block]] | None:
        """Room for `num_new` tokens after those that are computed, hit here (`local`) or elsewhere (`num_external`).

        The new blocks by group, or None when there are not enough. (vLLM: `allocate_slots`.)
        """
        total = request.num_computed_tokens + num_local + num_external
        held = self.of(request.request_id)
        if held[0]:
            self.drop_skipped(request, total - request.num_in_flight_tokens)
        wanted = 0
        starts: list[int] = []
        for number, group in enumerate(self.groups):
            if held[number]:
                start = len(held[number])
            else:
                skipped = group.num_skipped(total) // group.tokens
                mine = local[number] if local else []
                kept = [block for block in mine[skipped:] if not block.is_null]
                wanted += sum(not block.num_users for block in kept)
                start = max(skipped, len(mine))
            starts.append(start)
            wanted += sum(self._kept(group, start, total, num_new, lookahead))
        if wanted > self.pool.num_free - reserved:
            return None
        if not held[0]:
            held = []
            for number, group in enumerate(self.groups):
                skipped = group.num_skipped(total) // group.tokens
                kept = list(local[number][skipped:]) if local else []
                self.pool.share(kept)
                table = [self.pool.null] * min(skipped, starts[number]) + kept
                held.append(table)
            self._tables[request.request_id] = held
            self._num_cached[request.request_id] = [len(table) for table in held]
        new: list[list[Block]] = []
        for number, group in enumerate(self.groups):
            needed = self._kept(group, starts[number], total, num_new, lookahead)
            new.append([self.pool.take(1)[0] if keep else self.pool.null for keep in needed])
            held[number] += new[-1]
        if remember:
            self.remember(request, min(total + num_new, request.num_tokens))
        return new

    @staticmethod
    def _kept(group: Group, start: int, total: int, num_new: int, lookahead: int) -> list[bool]:
        """For each block from index `start` on that the step needs an index for, whether it needs the block.

        Of states only the last, and that which `total` tokens computed elsewhere have left.
        """
        indices = range(start, -(-(total + num_new + lookahead) // group.tokens))
        if not group.state:
            return [True] * len(indices)
        return [index in (indices[-1], (total - 1) // group.tokens) for index in indices]

    def remember(self, request: Request, num_tokens: int) -> None:
        """Full blocks of the first `num_tokens` tokens may be hit from now on."""
        if not self.caching or request.request_id not in self._tables:
            return
        num_tokens = min(num_tokens, len(request.block_hashes) * self._hash_block_size)
        counts = self._num_cached[request.request_id]
        for number, (group, table) in enumerate(zip(self.groups, self.of(request.request_id), strict=True)):
            full = min(num_tokens // group.tokens, len(table))
            for index in range(counts[number], full):
                if not table[index].is_null:
                    self.pool.remember(table[index], self._content(request, number, index))
                    if group.state:
                        self._written_now.add(table[index])
            counts[number] = max(counts[number], full)

    def drop_skipped(self, request: Request, num_tokens: int) -> None:
        """Give back blocks that nobody reads who computes on from `num_tokens`."""
        for group, table in zip(self.groups, self.of(request.request_id), strict=True):
            count = min(group.num_skipped(max(0, num_tokens)) // group.tokens, len(table))
            gone = [block for block in table[:count] if not block.is_null]
            table[:count] = [self.pool.null] * count
            self.pool.give_back(reversed(gone))

    def pop(self, request: Request) -> list[Block]:
        """Forget the request's tables; its blocks, in the order in which they are to be given back."""
        self._num_cached.pop(request.request_id, None)
        tables = self._tables.pop(request.request_id, [])
        return [block for table in tables for block in reversed(table) if not block.is_null]
