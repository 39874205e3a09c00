"""What to allocate, as data: raw tensors made of regions, regions made of pages, pages made of views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import prod

import torch


class Order(Enum):
    """How the elements of one page follow each other."""

    ND = "ND"
    """Row-major in the shape; token-major wherever the first dimension counts tokens."""
    NZ = "NZ"
    """Fractal: `(columns / 16, tokens, 16)`, whatever the shape says (format 29)."""


class Container(Enum):
    """What a cache entry is in the dictionary that is registered."""

    TUPLE = "tuple"
    LIST = "list"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Component:
    """One tensor of a cache entry, seen as one kernel block of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of one kernel block: the tensor's shape without dimension 0."""
    num_tokens: int
    """Tokens in one kernel block; 0 where the block is a state."""
    order: Order = Order.ND
    first_head: int = 0
    """Index of the first head here among the model's KV heads."""
    num_heads: int = 1
    heads_first: bool = False
    """Whether a page holds head after head, not token after token."""

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"component {self.name}: every dimension must be at least 1, found {self.shape}")
        if self.num_tokens and self.kernel_bytes % self.num_tokens:
            raise ValueError(f"component {self.name}: {self.shape} does not divide into {self.num_tokens} tokens")

    @property
    def kernel_bytes(self) -> int:
        """Bytes of one kernel block."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class View:
    """A component at its place in the pages of a region."""

    layer_name: str
    component: Component
    page_offset: int = 0
    """Bytes from the start of the page."""
    alias: bool = False
    """True for a second look at bytes that other views of the same entry hold."""


@dataclass(frozen=True)
class Region:
    """Pages one after the other, one a kernel block."""

    page_stride: int
    """Bytes from one page to the next."""
    views: tuple[View, ...] = ()
    kernel_blocks: int = 1
    """Kernel blocks that make one block of the manager."""
    alignment: int = 1
    """Of the region's start in its raw tensor, in bytes."""

    def __post_init__(self) -> None:
        for view in self.views:
            end = view.page_offset + view.component.kernel_bytes
            if view.page_offset < 0 or end > self.page_stride:
                raise ValueError(
                    f"{view.layer_name} {view.component.name} ends at byte {end} of a page of {self.page_stride}: "
                    "make the page stride larger"
                )


@dataclass(frozen=True)
class RawTensor:
    """One int8 allocation, viewed by components."""

    regions: tuple[Region, ...]
    storage: str | None = None
    """Raw tensors with the same name here lie in one storage; None is a storage of its own."""
    aligned: bool = True
    """Whether it starts on a 2 MiB boundary when KV transfer is on."""


@dataclass(frozen=True)
class Entry:
    """One name in the dictionary that is registered."""

    layer_name: str
    container: Container = Container.TUPLE
    group: int = 0
    """Layers of one group share a block table; block ids are unique over groups."""
    same_as: str | None = None
    """The layer whose tensors this one registers a second time."""


@dataclass(frozen=True)
class CacheSpec:
    """All caches of one rank. Add two specs to join them."""

    entries: tuple[Entry, ...] = ()
    raw_tensors: tuple[RawTensor, ...] = ()

    def __add__(self, other: CacheSpec) -> CacheSpec:
        return CacheSpec(self.entries + other.entries, self.raw_tensors + other.raw_tensors)

    @staticmethod
    def join(parts: Iterable[CacheSpec]) -> CacheSpec:
        """One spec of many."""
        parts = list(parts)
        return CacheSpec(tuple(e for p in parts for e in p.entries), tuple(r for p in parts for r in p.raw_tensors))

    def validate(self) -> None:
        """Raise `ValueError` for what no engine registers: names that clash or are missing, bytes with two owners."""
        groups = {entry.layer_name: entry.group for entry in self.entries}
        if len(groups) != len(self.entries):
            raise ValueError("every entry needs a name of its own: two layers have the same one")
        owners = {entry.layer_name for entry in self.entries if entry.same_as is None}
        viewed = {view.layer_name for _, view in self.placed()}
        if viewed != owners:
            raise ValueError(
                f"entries and views must name the same layers: only one side has {sorted(viewed ^ owners)}"
            )
        for entry in self.entries:
            if entry.same_as is not None and entry.same_as not in owners:
                raise ValueError(f"{entry.layer_name} shares {entry.same_as!r}, which is no entry with its own memory")
        for raw in self.raw_tensors:
            for region in raw.regions:
                own = sorted(
                    ((groups[v.layer_name], v.page_offset, v) for v in region.views if not v.alias),
                    key=lambda item: item[:2],
                )
                for (group, offset, view), (next_group, next_offset, after) in pairwise(own):
                    if group == next_group and offset + view.component.kernel_bytes > next_offset:
                        raise ValueError(
                            f"{view.layer_name} {view.component.name} and {after.layer_name} {after.component.name} "
                            f"overlap in the pages of group {group}: move one, or mark a second look as alias"
                        )

    def placed(self) -> Iterator[tuple[Region, View]]:
        """Every view with its region; the views of one entry come in the order of its tensors."""
        for raw in self.raw_tensors:
            for region in raw.regions:
                for view in region.views:
                    yield region, view

    def layer_bytes(self) -> dict[str, int]:
        """Bytes of one block in each entry that owns memory; a view of others' bytes counts nothing."""
        total = {entry.layer_name: 0 for entry in self.entries if entry.same_as is None}
        for region, view in self.placed():
            if not view.alias:
                total[view.layer_name] += view.component.kernel_bytes * region.kernel_blocks
        return total

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all entries."""
        return sum(self.layer_bytes().values())

    @property
    def num_buffers(self) -> int:
        """Components that hold bytes of a block: the buffers of one block when its pages are dense."""
        return sum(not view.alias for _, view in self.placed())
