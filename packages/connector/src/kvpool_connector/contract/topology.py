"""Which rank holds what: from a rank's coordinates to the content it holds and the blocks it writes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvpool_connector.contract.errors import TopologyError


@dataclass(frozen=True, order=True)
class Rank:
    """Coordinates of one worker. Decode context parallelism reuses tensor-parallel ranks, so it has no coordinate."""

    pp: int = 0
    pcp: int = 0
    tp: int = 0


@dataclass(frozen=True)
class HeadRange:
    """KV heads `first .. first + count - 1` of `total`."""

    first: int
    count: int
    total: int


HeadSplit = Literal["rank", "head"] | tuple[int, ...]
"""Which KV heads share an object: all of a rank, each its own, or as many as a rank of every tensor parallel size named
holds whole."""


@dataclass(frozen=True)
class ContextRange:
    """This rank's part of each logical block's tokens: runs of `interleave` tokens, every `size`-th run."""

    position: int
    size: int
    interleave: int


@dataclass(frozen=True)
class Writer:
    """Position `index` among the `count` ranks that hold the very same content."""

    index: int
    count: int

    def writes(self, block_hash: bytes) -> bool:
        """True on exactly one of the `count` ranks for each block.

        The block's own hash decides, so the partition does not shift when a prefix is already stored.
        """
        return int.from_bytes(block_hash[-8:], "big") % self.count == self.index


@dataclass(frozen=True)
class LayerCuts:
    """Where objects are cut along the model's layers, so that engines with other pipelines can share them."""

    starts: tuple[int, ...] = ()
    """First layer of each part, from 0 on. Empty: an object holds what a pipeline stage holds."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> LayerCuts:
        """From the number of layers of each part."""
        return cls(tuple(sum(sizes[:i]) for i in range(len(sizes))))

    @property
    def num_parts(self) -> int:
        """Objects of a block that one rank may hold."""
        return max(1, len(self.starts))

    def part(self, label: str) -> int:
        """The part that holds a layer; what has no index among the base layers (MTP) is in the last."""
        return bisect_right(self.starts, int(label)) - 1 if self.starts and label.isdigit() else self.num_parts - 1


def even_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """vLLM's own partition: what is left over goes to the stages before the last one (`get_pp_indices`, 0.32.0)."""
    base, left = divmod(num_layers, num_stages)
    return tuple(base + (num_stages - 1 - left <= i < num_stages - 1) for i in range(num_stages))


@dataclass(frozen=True)
class Topology:
    """The parallel shape of one engine.

    `num_kv_heads` counts the KV heads of the whole model; a latent cache (MLA, DSA) has one, so that "more ranks than
    heads" and "replicated" are the same case. One block of the scheduler covers `block_size * pcp_size * dcp_size`
    tokens (vLLM: `total_cp_rank = pcp_rank * dcp_size + dcp_rank`).
    """

    num_kv_heads: int
    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    cp_interleave: int = 1
    cuts: LayerCuts = LayerCuts()

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "tp_size", "pp_size", "pcp_size", "dcp_size", "cp_interleave"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise TopologyError(f"{name} is {value!r}; expected a whole number of at least 1")
        if self.tp_size % self.num_kv_heads and self.num_kv_heads % self.tp_size:
            raise TopologyError(
                f"tensor parallel size {self.tp_size} and {self.num_kv_heads} KV heads do not divide one another; "
                f"choose a tensor parallel size that is a divisor or a multiple of {self.num_kv_heads}"
            )
        if self.num_replicas % self.dcp_size:
            raise TopologyError(
                f"decode context parallel size {self.dcp_size} does not divide the {self.num_replicas} ranks that hold "
                f"the same KV head (tensor parallel size {self.tp_size}, {self.num_kv_heads} KV heads); "
                f"choose a divisor of {self.num_replicas}"
            )

    @property
    def num_replicas(self) -> int:
        """Tensor-parallel ranks that hold the same KV heads (before context parallelism splits their tokens)."""
        return max(1, self.tp_size // self.num_kv_heads)

    @property
    def cp_size(self) -> int:
        """Ranks over which a logical block's tokens are interleaved."""
        return self.pcp_size * self.dcp_size

    def with_heads(self, num_heads: int | None) -> Topology:
        """The same ranks over content that tensor parallelism splits into other parts than the model's KV heads."""
        return self if num_heads is None else replace(self, num_kv_heads=num_heads)

    def ranks(self) -> Iterator[Rank]:
        """Every worker, in vLLM's order (tp fastest)."""
        for pp in range(self.pp_size):
            for pcp in range(self.pcp_size):
                for tp in range(self.tp_size):
                    yield Rank(pp, pcp, tp)

    def heads(self, rank: Rank) -> HeadRange:
        """The KV heads that `rank` holds."""
        count = max(1, self.num_kv_heads // self.tp_size)
        return HeadRange(first=rank.tp // self.num_replicas * count, count=count, total=self.num_kv_heads)

    def heads_per_shard(self, split: HeadSplit) -> int:
        """KV heads of one shard. Raises `TopologyError` when tensor parallel sizes are named that do not fit."""
        if split == "rank":
            return self.heads(Rank()).count
        if split == "head":
            return 1
        if self.tp_size not in split:
            raise TopologyError(
                f"kv_head_split = {list(split)} does not name this engine's tensor parallel size {self.tp_size}; give "
                "every engine that shares the same list of all their sizes"
            )
        wrong = [size for size in split if size % self.num_kv_heads and self.num_kv_heads % size]
        if wrong:
            raise TopologyError(
                f"kv_head_split = {list(split)}: tensor parallel size {wrong[0]} and {self.num_kv_heads} KV heads do "
                f"not divide one another; name divisors or multiples of {self.num_kv_heads}"
            )
        return math.gcd(*(max(1, self.num_kv_heads // size) for size in split))

    def shard_heads(self, rank: Rank, heads_per_shard: int) -> list[HeadRange]:
        """The KV heads of each shard that `rank` holds."""
        held = self.heads(rank)
        return [
            HeadRange(held.first + first, heads_per_shard, held.total)
            for first in range(0, held.count, heads_per_shard)
        ]

    def context(self, rank: Rank) -> ContextRange:
        """The part of each logical block's tokens that `rank` holds."""
        position = rank.pcp * self.dcp_size + rank.tp % self.dcp_size
        # Without context parallelism the interleave decides nothing, so it must not keep equal content apart.
        return ContextRange(position, self.cp_size, self.cp_interleave if self.cp_size > 1 else 1)

    def writer(self, rank: Rank) -> Writer:
        """The share of writing that falls to `rank` among those that hold the same heads and tokens."""
        return Writer(index=rank.tp % self.num_replicas // self.dcp_size, count=self.num_replicas // self.dcp_size)
