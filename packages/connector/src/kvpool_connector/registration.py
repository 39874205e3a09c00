"""Reads layouts from the tensors that the engine registers. What cannot be stored byte for byte is refused here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

from kvpool_connector.contract.errors import LayoutError
from kvpool_connector.contract.layout import REGION_ALIGNMENT, Component, Layer, Region, ShardLayout

COMPONENT_NAMES: dict[str, dict[int, tuple[str, ...]]] = {
    "attention": {
        1: ("kv",),
        2: ("k", "v"),
        3: ("k_nope", "k_pe", "dsa_k"),
        4: ("k_nope", "k_pe", "dsa_k", "dsa_k_scale"),
    },
    "latent": {
        1: ("kv",),
        2: ("k_nope", "k_pe"),
        3: ("k_nope", "k_pe", "dsa_k"),
        4: ("k_nope", "k_pe", "dsa_k", "dsa_k_scale"),
    },
    "indexer": {1: ("dsa_k",), 2: ("dsa_k", "dsa_k_scale"), 3: ("dsa_k", "dsa_k_scale", "dsa_k_and_scale")},
    "state": {1: ("ssm",), 2: ("conv", "ssm")},
}
"""Names of an entry's tensors by the entry's kind and their number. They name; addresses never depend on them."""

ORDERS = ("NHD", "HND", "NZ")
_MTP = re.compile(r"(?:^|\.)mtp(?:\.layers)?\.(\d+)(?:\.|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


class Tensor(Protocol):
    """What is read of a tensor; torch's satisfies it."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def stride(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def untyped_storage(self) -> Any: ...


@dataclass(frozen=True)
class GroupSpec:
    """What the engine says of one KV cache group, beyond its tensors."""

    layer_names: tuple[str, ...]
    block_size: int
    """Tokens of one block on this rank."""
    num_blocks: int
    """Blocks that the engine's manager hands out; a tensor may have more."""
    order: str = "NHD"
    """Meaning of a page's axes. Equal shapes cannot tell it, so the engine must."""
    kind: str = "attention"
    context_size: int = 1
    """Ranks over which a logical block's tokens are interleaved: an indexer may hold a copy for each of them."""


@dataclass(frozen=True)
class _View:
    """One tensor as registered: `num_kernel_blocks` pages of `page_bytes`, `stride` bytes apart."""

    where: str
    component: Component
    kernel_stride: int
    kernel_page_bytes: int
    num_kernel_blocks: int
    storage: int

    @property
    def end(self) -> int:
        return self.component.base_address + (self.num_kernel_blocks - 1) * self.kernel_stride + self.kernel_page_bytes


def read_layouts(kv_caches: Mapping[str, Any], groups: Sequence[GroupSpec]) -> tuple[ShardLayout, ...]:
    """One layout a group, from `register_kv_caches`' mapping of layer names to a tensor or a tuple or list of tensors.

    Tensors are `(num_kernel_blocks, *page)`. Raises `LayoutError` naming layer, component, what was found and what was
    expected.
    """
    known = {name for group in groups for name in group.layer_names}
    strays = [name for name in kv_caches if name not in known]
    if strays:
        raise LayoutError(
            f"cache entries {strays[:4]} ({len(strays)} in all) belong to no KV cache group; every registered entry "
            "must be listed by the engine's KV cache configuration"
        )
    return tuple(_read_group(kv_caches, index, group) for index, group in enumerate(groups))


def _read_group(kv_caches: Mapping[str, Any], index: int, group: GroupSpec) -> ShardLayout:
    if group.num_blocks < 1:
        raise LayoutError(f"KV cache group {index} has {group.num_blocks} blocks; expected at least 1")
    if group.order not in ORDERS:
        raise LayoutError(f"KV cache group {index}: order {group.order!r} is unknown; expected one of {ORDERS}")
    entries: dict[tuple[tuple[int, ...], ...], tuple[list[str], list[_View]]] = {}
    names = sorted(group.layer_names, key=_layer_order)
    for name in names:
        if name not in kv_caches:
            raise LayoutError(
                f"layer {name!r} of KV cache group {index} was not registered; got {len(kv_caches)} entries"
            )
    found = {name: _read_entry(name, kv_caches[name], group) for name in names}
    for name, views in _with_copies(found, group).items():
        # A layer that shares another's tensors registers them a second time: moved once, under both names.
        same = tuple(
            (v.component.base_address, v.kernel_stride, v.kernel_page_bytes, v.num_kernel_blocks) for v in views
        )
        entries.setdefault(same, ([], views))[0].append(name)
    all_views = [view for _, views in entries.values() for view in views]
    _refuse_overlaps(all_views)
    layers: dict[str, Layer] = {}
    for names, views in entries.values():
        label = _label(names[0])
        layer = layers.get(label, Layer(label, (), ()))
        layers[label] = replace(
            layer,
            layer_names=(*layer.layer_names, *names),
            components=(*layer.components, *(view.component for view in views)),
        )
    return ShardLayout(index, group.block_size, group.num_blocks, tuple(layers.values()), _regions(all_views))


def _read_entry(name: str, entry: Any, group: GroupSpec) -> list[_View]:
    tensors = [entry] if hasattr(entry, "data_ptr") else list(entry) if isinstance(entry, tuple | list) else None
    if not tensors or not all(hasattr(tensor, "data_ptr") for tensor in tensors):
        raise LayoutError(
            f"layer {name!r}: a cache entry of type {type(entry).__name__} with "
            f"{[type(t).__name__ for t in tensors or []]} is unknown; expected a tensor or a tuple or list of tensors"
        )
    kind = "indexer" if is_indexer(name) and group.kind != "state" else group.kind
    names = COMPONENT_NAMES[kind].get(len(tensors))
    if names is None:
        raise LayoutError(
            f"layer {name!r}: an entry of {len(tensors)} tensors is unknown for a cache of kind {kind!r}; expected "
            f"{sorted(COMPONENT_NAMES[kind])} tensors"
        )
    views = [_read_tensor(name, component, tensor, group) for component, tensor in zip(names, tensors, strict=True)]
    counts = {
        view.component.name: view.num_kernel_blocks * view.kernel_page_bytes // view.component.page_bytes
        for view in views
    }
    if len(set(counts.values())) > 1:
        raise LayoutError(
            f"layer {name!r}: its components have unequal numbers of blocks {counts}; expected one number"
        )
    return _without_whole(views)


def _without_whole(views: list[_View]) -> list[_View]:
    """Leaves out a view that covers exactly the pages of the entry's other views: its bytes are moved as theirs."""
    for whole in views:
        others = sorted((view for view in views if view is not whole), key=lambda view: view.component.base_address)
        end = whole.component.base_address
        for view in others:
            if view.kernel_stride != whole.kernel_stride or view.component.base_address != end:
                break
            end += view.kernel_page_bytes
        else:
            if len(others) > 1 and end == whole.component.base_address + whole.kernel_page_bytes:
                return [view for view in views if view is not whole]
    return views


def _with_copies(entries: Mapping[str, list[_View]], group: GroupSpec) -> Mapping[str, list[_View]]:
    """The entries, each indexer with all its pages of a block: copies lie one after the other in dimension 0."""
    num_blocks = {
        views[0].num_kernel_blocks * views[0].kernel_page_bytes // views[0].component.page_bytes
        for name, views in entries.items()
        if not is_indexer(name)
    }
    if group.context_size == 1 or group.kind == "state" or len(num_blocks) != 1:
        return entries
    (total,) = num_blocks
    read = {}
    for name, views in entries.items():
        held = views[0].num_kernel_blocks * views[0].kernel_page_bytes // views[0].component.page_bytes
        copies = held // total
        if is_indexer(name) and held != total:
            if held % total or group.context_size % copies:
                raise LayoutError(
                    f"layer {name!r}: found {held} blocks beside {total} of the attention's; expected as many, or as "
                    f"many times more as a divisor of the context parallel size {group.context_size}"
                )
            views = [_copied(view, copies) for view in views]
        read[name] = views
    return read


def _copied(view: _View, copies: int) -> _View:
    one = view.component
    dense = one.block_stride == one.page_bytes
    if one.num_pieces > 1:
        raise LayoutError(
            f"{view.where}: {copies} copies of blocks that are {one.num_pieces} padded pages each are unknown; "
            "register the indexer without holes"
        )
    component = replace(
        one,
        page_shape=(copies * one.page_shape[0], *one.page_shape[1:]),
        block_stride=copies * one.block_stride,
        piece_bytes=one.piece_bytes * (copies if dense else 1),
        num_pieces=1 if dense else copies,
        piece_stride=0 if dense else one.block_stride,
    )
    return replace(view, component=component)


def _read_tensor(layer_name: str, name: str, tensor: Tensor, group: GroupSpec) -> _View:
    where = f"layer {layer_name!r}, component {name!r}"
    shape, strides, item = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), int(tensor.element_size())
    found = f"shape {shape}, strides {strides} (elements of {item} bytes)"
    if len(shape) < 2 or 0 in shape:
        raise LayoutError(
            f"{where}: found {found}; expected (num_blocks, *page) with at least one block and no empty axis"
        )
    page, order = _dense_page(where, found, shape[1:], strides[1:], group.order)
    kernel_page_bytes, kernel_stride = _product(page) * item, strides[0] * item
    if shape[0] > 1 and kernel_stride < kernel_page_bytes:
        raise LayoutError(
            f"{where}: blocks overlap: found {found}, a block every {kernel_stride} bytes; expected at least the "
            f"page's {kernel_page_bytes}"
        )
    if order == "NHD" and len(page) == 3 and page[2] == 16 and page[1] == group.block_size != page[0]:
        raise LayoutError(
            f"{where}: found {found}: this is the NZ order of a 310P, (columns, block_size, 16), but the order is "
            'given as ND; set cache_order to "NZ"'
        )
    ratio, page = _kernel_ratio(where, found, page, order, group)
    if shape[0] < ratio * group.num_blocks:
        raise LayoutError(
            f"{where}: found {found}, that is {shape[0]} blocks; expected at least {ratio * group.num_blocks} "
            f"({group.num_blocks} blocks of {group.block_size} tokens in {ratio} pages each)"
        )
    dense = ratio == 1 or kernel_stride == kernel_page_bytes
    component = Component(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        page_shape=page,
        order=order,
        base_address=int(tensor.data_ptr()),
        block_stride=ratio * kernel_stride,
        piece_bytes=kernel_page_bytes * (ratio if dense else 1),
        num_pieces=1 if dense else ratio,
        piece_stride=0 if dense else kernel_stride,
    )
    return _View(where, component, kernel_stride, kernel_page_bytes, shape[0], int(tensor.untyped_storage().data_ptr()))


def _dense_page(
    where: str, found: str, page: tuple[int, ...], strides: tuple[int, ...], order: str
) -> tuple[tuple[int, ...], str]:
    """The page's shape and order as its bytes lie in memory; refuses a page with holes."""
    # An axis of length 1 has no meaningful stride: it keeps its place.
    axes = sorted(
        range(len(page)), key=lambda axis: -strides[axis] if page[axis] > 1 else -_product(page[axis:]) * strides[-1]
    )
    expected = 1
    for axis in reversed(axes):
        if page[axis] > 1:
            if strides[axis] != expected:
                raise LayoutError(f"{where}: the page is not dense: found {found}; expected a page without holes")
            expected *= page[axis]
    if axes != sorted(axes):
        if len(page) != len(order):
            raise LayoutError(
                f"{where}: the page's axes are permuted and their meaning is unknown: found {found}, order {order!r}; "
                "register the cache in memory order"
            )
        order = "".join(order[axis] for axis in axes)
    return tuple(page[axis] for axis in axes), order


def _kernel_ratio(
    where: str, found: str, page: tuple[int, ...], order: str, group: GroupSpec
) -> tuple[int, tuple[int, ...]]:
    """How many registered pages make one block of the manager, and the block's page shape."""
    if group.kind == "state":
        return 1, page
    if order == "NZ":
        # A latent page keeps its shape `(block_size, 1, size)`; the 310P's says its order, `(columns, block_size, 16)`.
        tokens = page[0 if len(page) < 3 or page[1] == 1 else 1]
        if group.block_size != tokens:
            raise LayoutError(
                f"{where}: found {found}, {tokens} tokens a page in NZ order; expected the block size "
                f"{group.block_size}: kernel blocks smaller than it are not supported in NZ order"
            )
        return 1, page
    axis = order.index("N")
    tokens = page[axis] if axis < len(page) else 0
    if not tokens or group.block_size % tokens:
        raise LayoutError(
            f"{where}: found {found}, {tokens} tokens a page in order {order!r}; expected a divisor of the block size "
            f"{group.block_size}"
        )
    ratio = group.block_size // tokens
    if ratio == 1:
        return 1, page
    # With tokens first, consecutive pages read like one longer page; otherwise the page count is part of the order.
    return ratio, ((group.block_size, *page[1:]) if axis == 0 else (ratio, *page))


def _refuse_overlaps(views: Sequence[_View]) -> None:
    """No two components may share a byte: one of them would be stored under the other's name."""
    for first, second in combinations(sorted(views, key=lambda view: view.component.base_address), 2):
        if second.component.base_address >= first.end:
            continue
        if first.kernel_stride == second.kernel_stride:
            # Pages repeat with the same period, so one period tells.
            gap = (second.component.base_address - first.component.base_address) % first.kernel_stride
            if gap >= first.kernel_page_bytes and gap + second.kernel_page_bytes <= first.kernel_stride:
                continue
        raise LayoutError(
            f"{first.where} and {second.where} overlap: found pages of {first.kernel_page_bytes} bytes every "
            f"{first.kernel_stride} from {first.component.base_address:#x} and of {second.kernel_page_bytes} bytes "
            f"every {second.kernel_stride} from {second.component.base_address:#x}; expected disjoint pages"
        )


def _regions(views: Iterable[_View]) -> tuple[Region, ...]:
    """One region a storage, however many layers lie in it, from a multiple of 2 MiB where the storage has one."""
    spans: dict[int, tuple[int, int]] = {}
    for view in views:
        rounded = view.component.base_address // REGION_ALIGNMENT * REGION_ALIGNMENT
        # What lies before the storage is another's.
        first = rounded if rounded >= view.storage else view.component.base_address
        start, end = spans.get(view.storage, (first, view.end))
        spans[view.storage] = (min(start, first), max(end, view.end))
    return tuple(Region(start, end - start) for start, end in sorted(spans.values()))


def merged(regions: Iterable[Region]) -> list[Region]:
    """The regions, those that share bytes made one: groups in the same memory register it once."""
    found: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.address, r.num_bytes)):
        if found and region.address < found[-1].address + found[-1].num_bytes:
            last = found[-1]
            end = max(last.address + last.num_bytes, region.address + region.num_bytes)
            found[-1] = Region(last.address, end - last.address)
        else:
            found.append(region)
    return found


def is_indexer(layer_name: str) -> bool:
    """True for a sparse attention's indexer that registers a cache entry of its own."""
    return "indexer" in layer_name


def _layer_order(name: str) -> tuple[int, int, str]:
    """Base layers by index, then MTP layers by index, then names without an index."""
    for rank, pattern in enumerate((_MTP, _LAYER)):
        match = pattern.search(name)
        if match:
            return (1 - rank, int(match[1]), name)
    return (2, 0, name)


def _label(name: str) -> str:
    kind, index, _ = _layer_order(name)
    return (str(index), f"mtp.{index}", name)[kind]


def _product(numbers: Iterable[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
