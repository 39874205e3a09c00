"""What the KV of a token must be, byte by byte, and whether it is.

A row (one token of one head of one component of one layer) is a pseudo-random function of the token's prefix, the
layer, the component and the head. A block of states has one row, that of the last token before its end. It knows
nothing of ranks and blocks, so ranks that hold the same heads and tokens hold the same bytes, and whatever lands in the
wrong place, or comes from elsewhere, is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvpool_simulator.device import Caches
from kvpool_simulator.device.arena import POISON, Bytes
from kvpool_simulator.device.caches import FRACTAL_COLUMNS, Place
from kvpool_simulator.device.spec import Order

Keys = NDArray[np.uint64]
"""Numbers of prefixes, one a token."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def _words(count: int, *parts: object) -> Keys:
    """`count` fixed random words that follow from `parts`."""
    digests = (blake2b(repr((parts, i)).encode(), digest_size=8).digest() for i in range(count))
    return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)


def weighed(keys: Keys, weights: int) -> Keys:
    """What prefixes stand for under weights of another number."""
    return keys ^ np.full_like(keys, weights) * _FACTOR


class Component:
    """One component of one layer on one rank, seen as `(blocks, kernel blocks, tokens, heads, bytes)`."""

    def __init__(self, layer_name: str, place: Place, memory: Bytes, arena_address: int, num_blocks: int) -> None:
        component = place.component
        self.name = component.name
        tokens, heads, item = component.num_tokens or 1, component.num_heads, component.dtype.itemsize
        self.row_bytes = component.kernel_bytes // (tokens * heads)
        pieces, piece = 1, self.row_bytes
        if component.order is Order.NZ:
            piece = FRACTAL_COLUMNS * item
            pieces = self.row_bytes // piece
            token_stride, piece_stride, head_stride = piece, tokens * piece, pieces * tokens * piece
        elif component.heads_first:
            token_stride, piece_stride, head_stride = self.row_bytes, 0, tokens * self.row_bytes
        else:
            token_stride, piece_stride, head_stride = heads * self.row_bytes, 0, self.row_bytes
        self.tokens = tokens
        self.view: Bytes = as_strided(
            memory[place.address - arena_address :],
            (num_blocks, place.kernel_blocks, tokens, heads, pieces, piece),
            (place.kernel_blocks * place.stride, place.stride, token_stride, head_stride, piece_stride, 1),
        )
        words = -(-self.row_bytes // 8)
        first = component.first_head
        content = layer_name.replace(".indexer.k_cache", ".attn")
        self.salt = np.stack([_words(words, content, component.name, head) for head in range(first, first + heads)])
        self.identity = (content, component.name, first, heads, self.row_bytes)
        """Equal for components whose rows are equal."""

    def expected(self, keys: Keys) -> Bytes:
        """`(len(keys), heads, row_bytes)`: the rows of these tokens."""
        words = (keys[:, None, None] ^ self.salt) * _FACTOR
        words ^= words >> np.uint64(29)
        return words.view(np.uint8)[:, :, : self.row_bytes]

    def _shaped(self, rows: Bytes) -> Bytes:
        return rows.reshape(*rows.shape[:2], *self.view.shape[4:])

    def write(self, block_ids: NDArray[np.int64], rows_at: NDArray[np.int64], rows: Bytes) -> None:
        """Set row `rows_at[i]` of block `block_ids[i]`."""
        self.view[block_ids, rows_at // self.tokens, rows_at % self.tokens] = self._shaped(rows)

    def wrong(self, block_ids: NDArray[np.int64], rows_at: NDArray[np.int64], rows: Bytes) -> NDArray[np.bool_]:
        """For each row whether any byte of it differs."""
        found = self.view[block_ids, rows_at // self.tokens, rows_at % self.tokens]
        if np.array_equal(found, self._shaped(rows)):
            return np.zeros(len(block_ids), np.bool_)
        differs: NDArray[np.bool_] = (found != self._shaped(rows)).reshape(len(block_ids), -1).any(axis=1)
        return differs

    def describe(self, block_id: int, row_at: int, row: Bytes) -> str:
        """What is there instead, in words."""
        found = self.view[block_id, row_at // self.tokens, row_at % self.tokens].reshape(-1)
        differs = found != row.reshape(-1)
        poison = int((found[differs] == POISON).sum())
        return f"{int(differs.sum())} of {found.size} bytes wrong, {poison} of them poison"


@dataclass(frozen=True)
class Rows:
    """Tokens of one request as one rank holds them."""

    keys: Keys
    block_ids: NDArray[np.int64]
    rows_at: NDArray[np.int64]
    """Row within the rank's block."""


class RankMemory:
    """All components of one rank, by layer."""

    def __init__(self, caches: Caches, cp_position: int = 0, cp_size: int = 1, interleave: int = 1) -> None:
        self.caches = caches
        self.layers: dict[str, list[Component]] = {
            name: [
                Component(name, place, caches.arena.memory, caches.arena.address, caches.num_blocks)
                for place in caches.places[name]
                if not place.alias
            ]
            for name in caches.layer_names()
        }
        self.cp_position, self._size, self._interleave = cp_position, cp_size, interleave

    def rows(self, keys: Keys, table: Sequence[int], block_size: int, start: int, *, state: bool = False) -> Rows:
        """Where the tokens `start ...` with these keys lie on this rank; those of others, or in no block, are left out.

        `table`: block ids by block index, 0 for none; `block_size`: tokens of a block over all context-parallel ranks;
        `state`: blocks hold states, not tokens.
        """
        positions = np.arange(start, start + len(keys))
        within = positions % block_size
        mine = within // self._interleave % self._size == self.cp_position
        block_ids = np.asarray(table, np.int64)[positions // block_size]
        mine &= block_ids != 0
        within = within[mine]
        run = self._interleave
        rows_at = np.zeros_like(within) if state else within // (run * self._size) * run + within % run
        return Rows(keys[mine], block_ids[mine], rows_at)
