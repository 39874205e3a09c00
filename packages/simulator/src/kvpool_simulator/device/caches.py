"""The caches of one rank in memory: what is registered, and where every page of every block lies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from kvpool_simulator.device.arena import (
    ALLOCATOR_ALIGNMENT,
    GUARD_BYTES,
    POISON,
    START_ALIGNMENT,
    Arena,
    Bytes,
    Damage,
    Snapshot,
)
from kvpool_simulator.device.spec import CacheSpec, Component, Container, Order, RawTensor, Region, View

Entry = torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]
Range = tuple[int, int]
"""`(address, size)` in bytes."""
FRACTAL_COLUMNS = 16
"""Elements in a row of an NZ fractal."""


@dataclass(frozen=True)
class Place:
    """Where one component lies."""

    component: Component
    address: int
    """Of kernel block 0."""
    stride: int
    """Bytes from one kernel block to the next."""
    kernel_blocks: int
    """Kernel blocks that make one block of the manager."""
    alias: bool
    """Whether all its bytes belong to other components of the same entry."""


class Caches:
    """Caches in an arena. `kv_caches` is what `register_kv_caches` receives; the rest is for oracles."""

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: int,
        arena: Arena,
        kv_caches: dict[str, Entry],
        places: dict[str, tuple[Place, ...]],
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.arena = arena
        self.kv_caches = kv_caches
        self.places = places

    def layer_names(self, group: int | None = None) -> list[str]:
        """Entries that own their memory, of one group or of all."""
        return [e.layer_name for e in self.spec.entries if e.same_as is None and group in (None, e.group)]

    @property
    def groups(self) -> list[int]:
        """Groups of entries, in rising order."""
        return sorted({entry.group for entry in self.spec.entries})

    def components(self, layer_name: str) -> tuple[Component, ...]:
        """The components of an entry, in the order of its tensors."""
        return tuple(place.component for place in self.places[layer_name])

    def pages(self, layer_name: str, component_index: int, block_id: int) -> list[Range]:
        """The bytes of one manager block in one component: one range, or one a kernel block where holes part them."""
        place = self._place(layer_name, component_index, block_id)
        size = place.component.kernel_bytes
        first = place.address + block_id * place.kernel_blocks * place.stride
        if place.stride == size:
            return [(first, size * place.kernel_blocks)]
        return [(first + i * place.stride, size) for i in range(place.kernel_blocks)]

    def token_ranges(self, layer_name: str, component_index: int, block_id: int, num_tokens: int) -> list[Range]:
        """The bytes of the first `num_tokens` tokens of a block: a prefix of the page only where it is token-major."""
        place = self._place(layer_name, component_index, block_id)
        component = place.component
        capacity = component.num_tokens * place.kernel_blocks
        if not 0 <= num_tokens <= capacity or capacity == 0:
            raise ValueError(f"{layer_name} {component.name} holds {capacity} tokens a block, asked for {num_tokens}")
        pieces = 1
        if component.order is Order.NZ:
            pieces = component.kernel_bytes // (component.num_tokens * FRACTAL_COLUMNS * component.dtype.itemsize)
        elif component.heads_first:
            pieces = component.num_heads
        piece_bytes = component.kernel_bytes // pieces
        token_bytes = piece_bytes // component.num_tokens
        ranges = []
        for i in range(place.kernel_blocks):
            start = place.address + (block_id * place.kernel_blocks + i) * place.stride
            here = min(max(num_tokens - i * component.num_tokens, 0), component.num_tokens)
            if here:
                ranges += [(start + j * piece_bytes, here * token_bytes) for j in range(pieces)]
        return ranges

    def block_ranges(self, block_ids: Iterable[int], group: int | None = None) -> list[Range]:
        """All bytes of these blocks in all components: outside them a load into these blocks changes nothing."""
        return [
            page
            for name in self.layer_names(self.one_group(group))
            for index in range(len(self.places[name]))
            for block_id in block_ids
            for page in self.pages(name, index, block_id)
        ]

    def read(self, layer_name: str, component_index: int, block_id: int) -> bytes:
        """The bytes of one block in one component."""
        views = [self.arena.view(*page) for page in self.pages(layer_name, component_index, block_id)]
        return b"".join(view.tobytes() for view in views)

    def write(self, layer_name: str, component_index: int, block_id: int, data: bytes | Bytes) -> None:
        """Set the bytes of one block in one component; `data` has exactly their number."""
        source = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        pages = self.pages(layer_name, component_index, block_id)
        expected = sum(size for _, size in pages)
        if len(source) != expected:
            name = self.places[layer_name][component_index].component.name
            raise ValueError(f"{layer_name} {name} has {expected} bytes a block, found {len(source)}")
        done = 0
        for address, size in pages:
            self.arena.view(address, size)[:] = source[done : done + size]
            done += size

    def poison(self, byte: int = POISON) -> None:
        """Fill every page of every component, as if nothing had ever been computed."""
        self.arena.poison(byte)

    def poison_blocks(self, block_ids: Iterable[int], group: int | None = None, byte: int = POISON) -> None:
        """Fill the pages of these blocks."""
        for address, size in self.block_ranges(block_ids, group):
            self.arena.view(address, size).fill(byte)

    def check_guards(self, limit: int = 16) -> list[Damage]:
        """Where a byte changed that is in no page of a block."""
        return self.arena.check_guards(limit)

    def snapshot(self) -> Snapshot:
        """A copy of every byte, to compare with later."""
        return self.arena.snapshot()

    def _place(self, layer_name: str, component_index: int, block_id: int) -> Place:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} does not exist: {self.num_blocks} blocks were allocated")
        return self.places[layer_name][component_index]

    def one_group(self, group: int | None) -> int | None:
        """`group`, or None where there is only one; a block id alone does not say which of several is meant."""
        if group is None and len(self.groups) > 1:
            raise ValueError(f"a block belongs to one group: name one of {self.groups}")
        return group


def allocate(
    spec: CacheSpec, num_blocks: int, *, extra_blocks: int = 0, kv_transfer: bool = True, arena: Arena | None = None
) -> Caches:
    """Allocate the caches of `spec` for `num_blocks` blocks of the manager, poisoned, with guards around every page.

    `extra_blocks` more lie in every tensor and belong to nobody: their bytes are guards. Without `kv_transfer`
    nothing starts on a 2 MiB boundary. `arena` must have room for `arena_bytes` of the same arguments.
    """
    if num_blocks < 1 or extra_blocks < 0:
        raise ValueError(f"need at least 1 block and no negative extra, found {num_blocks} and {extra_blocks}")
    spec.validate()
    total = num_blocks + extra_blocks
    if arena is None:
        arena = Arena.anonymous(arena_bytes(spec, total, kv_transfer=kv_transfer))
    tensors: dict[str, list[torch.Tensor]] = {}
    places: dict[str, list[Place]] = {}
    for raws in _storages(spec):
        aligned = kv_transfer and raws[0].aligned
        starts, num_bytes = _starts(raws, total, aligned)
        storage = arena.allocate(num_bytes, aligned=aligned)
        for raw, start in zip(raws, starts, strict=True):
            offsets, _ = _region_offsets(raw, total)
            for region, offset in zip(raw.regions, offsets, strict=True):
                for view in region.views:
                    tensor = _tensor(storage.raw, start + offset, region, view, total)
                    tensors.setdefault(view.layer_name, []).append(tensor)
                    address = storage.address + start + offset + view.page_offset
                    place = Place(view.component, address, region.page_stride, region.kernel_blocks, view.alias)
                    places.setdefault(view.layer_name, []).append(place)
                    pages = address + np.arange(num_blocks * region.kernel_blocks) * region.page_stride
                    label = f"{view.layer_name} {view.component.name}"
                    arena.claim(label, pages, view.component.kernel_bytes, region.kernel_blocks)
    kv_caches: dict[str, Entry] = {}
    for entry in spec.entries:
        if entry.same_as is not None:
            kv_caches[entry.layer_name] = kv_caches[entry.same_as]
            places[entry.layer_name] = places[entry.same_as]
            continue
        made = tensors[entry.layer_name]
        if entry.container is Container.TENSOR and len(made) != 1:
            raise ValueError(f"{entry.layer_name} is one tensor, found {len(made)} components: make it a tuple")
        kv_caches[entry.layer_name] = (
            made[0]
            if entry.container is Container.TENSOR
            else made
            if entry.container is Container.LIST
            else tuple(made)
        )
    caches = Caches(spec, num_blocks, arena, kv_caches, {name: tuple(found) for name, found in places.items()})
    caches.poison()
    return caches


def arena_bytes(spec: CacheSpec, total_blocks: int, *, kv_transfer: bool = True) -> int:
    """Bytes of the arena that `allocate` needs for `total_blocks` blocks, extra ones counted."""
    sizes = []
    for raws in _storages(spec):
        aligned = kv_transfer and raws[0].aligned
        sizes.append((_starts(raws, total_blocks, aligned)[1], aligned))
    return Arena.bytes_for(sizes)


def _storages(spec: CacheSpec) -> list[list[RawTensor]]:
    """Raw tensors by storage, in order of their first."""
    storages: dict[object, list[RawTensor]] = {}
    for index, raw in enumerate(spec.raw_tensors):
        storages.setdefault(index if raw.storage is None else raw.storage, []).append(raw)
    return list(storages.values())


def _starts(raws: list[RawTensor], total_blocks: int, aligned: bool) -> tuple[list[int], int]:
    """Start of each raw tensor in its storage, guards between them, and the storage's size, in bytes."""
    starts: list[int] = []
    end = 0
    for raw in raws:
        grid = START_ALIGNMENT if aligned else ALLOCATOR_ALIGNMENT
        start = -(-(end + GUARD_BYTES) // grid) * grid if starts else 0
        starts.append(start)
        end = start + _region_offsets(raw, total_blocks)[1]
    return starts, end


def _region_offsets(raw: RawTensor, total_blocks: int) -> tuple[list[int], int]:
    """Start of each region in its raw tensor, and the tensor's size, in bytes."""
    offsets, end = [], 0
    for region in raw.regions:
        start = -(-end // region.alignment) * region.alignment
        offsets.append(start)
        end = start + region.page_stride * region.kernel_blocks * total_blocks
    return offsets, end


def _tensor(raw: torch.Tensor, offset: int, region: Region, view: View, total_blocks: int) -> torch.Tensor:
    """The view as the engine makes it: `(total_blocks * kernel_blocks, *shape)`."""
    component = view.component
    num = region.kernel_blocks * total_blocks
    rows = raw[offset : offset + num * region.page_stride].view(num, region.page_stride)
    page = rows[:, view.page_offset : view.page_offset + component.kernel_bytes]
    return page.view(component.dtype).view(num, *component.shape)
