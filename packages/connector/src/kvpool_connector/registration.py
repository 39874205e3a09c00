"""Reads layouts from the tensors that the engine registers. What cannot be stored byte for byte is refused here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol

from kvpool_connector.contract.errors import LayoutError
from kvpool_connector.contract.layout import Component, Layer, Region, ShardLayout

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
    "indexer": {1: ("dsa_k",), 2: ("dsa_k", "dsa_k_scale")},
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
    for name in sorted(group.layer_names, key=_layer_order):
        if name not in kv_caches:
            raise LayoutError(
                f"layer {name!r} of KV cache group {index} was not registered; got {len(kv_caches)} entries"
            )
        views = _read_entry(name, kv_caches[name], group)
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
    kind = "indexer" if is_indexer(name) else group.kind
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
    return views


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
        if group.block_size not in page:
            raise LayoutError(
                f"{where}: found {found}; expected an axis of block_size {group.block_size} tokens in NZ order"
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
    """One region a storage, however many layers lie in it."""
    spans: dict[int, tuple[int, int]] = {}
    for view in views:
        start, end = spans.get(view.storage, (view.component.base_address, view.end))
        spans[view.storage] = (min(start, view.component.base_address), max(end, view.end))
    return tuple(Region(start, end - start) for start, end in sorted(spans.values()))


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
