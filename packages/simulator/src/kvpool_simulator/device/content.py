"""What a block holds: bytes that follow from the prefix before it, the layer, the component and the head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvpool_simulator.device.arena import POISON, Bytes
from kvpool_simulator.device.caches import Caches, Place

_POOL_WORDS = 1 << 18

Words = NDArray[np.uint64]


@cache
def _pool() -> Words:
    """Fixed random words (the SplitMix64 sequence from 0), from which every page takes a window."""
    with np.errstate(over="ignore"):
        word = np.arange(1, 2 * _POOL_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return word ^ (word >> np.uint64(31))


def stream(num_bytes: int, *parts: bytes | str | int) -> Bytes:
    """`num_bytes` pseudo-random bytes that follow from `parts` alone, on every machine and in every version."""
    tagged = b"".join(
        kind + len(data).to_bytes(4, "little") + data
        for kind, data in (
            (type(p).__name__[:1].encode(), p if isinstance(p, bytes) else str(p).encode()) for p in parts
        )
    )
    digest = blake2b(tagged, digest_size=16).digest()
    start = int.from_bytes(digest[:8], "little") % _POOL_WORDS
    key = np.frombuffer(digest[8:], "<u8")[0]
    out = np.empty(-(-num_bytes // 8), np.uint64)
    for done in range(0, len(out), _POOL_WORDS):
        some = out[done : done + _POOL_WORDS]
        # Another key for every lap, or a long stream would repeat itself.
        lap = np.uint64(key ^ _pool()[done // _POOL_WORDS]) if done else key
        np.bitwise_xor(_pool()[start : start + len(some)], lap, out=some)
    return out.view(np.uint8)[:num_bytes]


@dataclass(frozen=True)
class Mismatch:
    """One page that does not hold its content."""

    layer_name: str
    component: str
    component_index: int
    block_id: int
    first_byte: int
    """Offset of the first wrong byte in the page (holes between kernel blocks not counted)."""
    num_wrong: int
    num_poison: int
    """How many of the wrong bytes are poison: never written since."""
    page_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.layer_name} {self.component} (component {self.component_index}), block {self.block_id}: "
            f"{self.num_wrong} of {self.page_bytes} bytes wrong from byte {self.first_byte}, {self.num_poison} poison"
        )


def page_content(place: Place, layer_name: str, prefix_hash: bytes | str | int, part: str = "") -> Bytes:
    """The bytes of one block in one component, dense.

    Each head has its own stream, named by its index in the model, so ranks that hold the same head hold the same bytes.
    `part` tells contents apart that a prefix alone does not: for one the tokens of a context-parallel rank.
    """
    component = place.component
    total = component.kernel_bytes * place.kernel_blocks
    heads = [
        stream(total // component.num_heads, prefix_hash, layer_name, component.name, head, part)
        for head in range(component.first_head, component.first_head + component.num_heads)
    ]
    if len(heads) == 1:
        return heads[0]
    outer = place.kernel_blocks * (1 if component.heads_first else component.num_tokens)
    return np.stack([head.reshape(outer, -1) for head in heads], axis=1).reshape(-1)


def fill(
    caches: Caches,
    block_id: int,
    prefix_hash: bytes | str | int,
    *,
    group: int | None = None,
    layer_names: Iterable[str] | None = None,
    part: str = "",
) -> None:
    """Write a block's content into all its components, of all layers (of `group`) or of `layer_names` alone."""
    for name, index, place in _components(caches, group, layer_names):
        caches.write(name, index, block_id, page_content(place, name, prefix_hash, part))


def check(
    caches: Caches,
    block_id: int,
    prefix_hash: bytes | str | int,
    *,
    group: int | None = None,
    layer_names: Iterable[str] | None = None,
    part: str = "",
) -> list[Mismatch]:
    """Compare every byte of a block with its content; one entry for each page that differs."""
    wrong = []
    for name, index, place in _components(caches, group, layer_names):
        expected = page_content(place, name, prefix_hash, part)
        found = [caches.arena.view(*page) for page in caches.pages(name, index, block_id)]
        actual = found[0] if len(found) == 1 else np.concatenate(found)
        if np.array_equal(actual, expected):
            continue
        at = np.flatnonzero(actual != expected)
        poison = int((actual[at] == POISON).sum())
        wrong.append(Mismatch(name, place.component.name, index, block_id, int(at[0]), len(at), poison, len(expected)))
    return wrong


def _components(
    caches: Caches, group: int | None, layer_names: Iterable[str] | None
) -> Iterator[tuple[str, int, Place]]:
    names = caches.layer_names(caches.one_group(group)) if layer_names is None else layer_names
    for name in names:
        for index, place in enumerate(caches.places[name]):
            if not place.alias:
                yield name, index, place
