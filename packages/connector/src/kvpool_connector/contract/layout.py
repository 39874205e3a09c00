"""Where the bytes of a block lie: layouts as data.

One path for all caches: a layout lists components, and a component says where its part of any block is. Nothing here
knows GQA from MLA.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

REGION_ALIGNMENT = 2 << 20
"""Where Ascend's transport wants registered memory to start, in bytes (vLLM-Ascend, `ascend_store/pool_worker.py`)."""


@dataclass(frozen=True)
class Component:
    """One tensor's part of a block, for example `k`, `v`, `k_nope`, `k_pe`, `dsa_k` or `dsa_k_scale`.

    The page of block `b` is `num_pieces` runs of `piece_bytes` bytes; run `p` starts at
    `base_address + b * block_stride + p * piece_stride`. A dense page has one run; a page whose kernel blocks are
    padded has one run a kernel block. All strides and sizes are in bytes, each component's own.
    """

    name: str
    dtype: str
    """Element type without a framework's prefix, for example `bfloat16`."""
    page_shape: tuple[int, ...]
    """Shape of one page, for example `(block_size, num_heads, head_dim)`."""
    order: str
    """Meaning and byte order of the page's axes: `NHD` (tokens first), `HND` (heads first) or `NZ` (fractal)."""
    base_address: int
    block_stride: int
    piece_bytes: int
    num_pieces: int = 1
    piece_stride: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in this component, without padding."""
        return self.num_pieces * self.piece_bytes

    def pieces(self, block_id: int) -> list[tuple[int, int]]:
        """`(address, size)` of each run of one block's page, in byte order."""
        start = self.base_address + block_id * self.block_stride
        return [(start + piece * self.piece_stride, self.piece_bytes) for piece in range(self.num_pieces)]


@dataclass(frozen=True)
class Layer:
    """One layer's components, in object order."""

    label: str
    """What identifies the layer in every process: `12`, `mtp.0`, or the full name where it has no index."""
    layer_names: tuple[str, ...]
    """The cache entries the components come from, as registered."""
    components: tuple[Component, ...]


@dataclass(frozen=True)
class Region:
    """A run of memory to register with the transport: `[address, address + num_bytes)`."""

    address: int
    num_bytes: int


@dataclass(frozen=True)
class ShardLayout:
    """Everything this rank holds of one group's blocks, in object order."""

    group: int
    block_size: int
    """Tokens of one block on this rank."""
    num_blocks: int
    layers: tuple[Layer, ...]
    regions: tuple[Region, ...] = ()

    @cached_property
    def components(self) -> tuple[Component, ...]:
        """All layers' components, in object order."""
        return tuple(component for layer in self.layers for component in layer.components)

    @cached_property
    def object_bytes(self) -> int:
        """Bytes of one block's object: all pages, one after the other, without padding."""
        return sum(component.page_bytes for component in self.components)

    @cached_property
    def num_pieces(self) -> int:
        """Runs of memory that make up one block."""
        return sum(component.num_pieces for component in self.components)
