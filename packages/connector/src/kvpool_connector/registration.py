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
SETTING_OF_ORDER = {"NHD": "ND", "HND": "HND", "NZ": "NZ"}
"""What `cache_order` is set to for it."""
_UNKNOWN = (
    "Serve this model without the pool, and report this message with the versions of vLLM and vLLM-Ascend: "
    "docs/layouts.md has the layouts that are known"
)
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
    open_orders: tuple[str, ...] = ()
    """Others that nobody ruled out: a page that could be in one of them as well is refused."""
    kind: str = "attention"
    context_size: int = 1
    """Ranks over which a logical block's tokens are interleaved: an indexer may hold a copy for each of them."""
    num_heads: int | None = None
    """Parts into which tensor parallelism splits the group's content, where they are not the model's KV heads."""


@dataclass(frozen=True)
class _View:
    """One tensor as registered: `num_kernel_blocks` pages of `page_bytes`, `stride` bytes apart."""

    where: str
    found: str
    """Shape, strides and element size, in words."""
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
        raise _refusal(
            f"layers {strays[:4]}",
            "registered, but in no KV cache group",
            f"{len(strays)} such layers, and {len(known)} in groups",
            "every registered layer in a group of the engine's KV cache configuration",
            _UNKNOWN,
        )
    return tuple(_read_group(kv_caches, index, group) for index, group in enumerate(groups))


def _read_group(kv_caches: Mapping[str, Any], index: int, group: GroupSpec) -> ShardLayout:
    if group.num_blocks < 1:
        raise _refusal(
            f"KV cache group {index}",
            "it has no blocks",
            f"{group.num_blocks} blocks",
            "at least 1",
            "Give the engine more memory for KV",
        )
    if unknown := [order for order in (group.order, *group.open_orders) if order not in ORDERS]:
        raise _refusal(
            f"KV cache group {index}", "its order is unknown", repr(unknown[0]), f"one of {ORDERS}", "Set cache_order"
        )
    entries: dict[tuple[tuple[int, ...], ...], tuple[list[str], list[_View]]] = {}
    names = sorted(group.layer_names, key=_layer_order)
    for name in names:
        if name not in kv_caches:
            raise _refusal(
                f"layer {name!r}",
                "in a KV cache group, but not registered",
                f"group {index} with it, and {len(kv_caches)} other layers registered",
                "every layer of a group on this rank to be registered",
                _UNKNOWN,
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
        raise _refusal(
            f"layer {name!r}",
            "this cache entry is unknown",
            f"{type(entry).__name__} of {[type(t).__name__ for t in tensors or []]}",
            "a tensor or a tuple or list of tensors",
            _UNKNOWN,
        )
    kind = "indexer" if is_indexer(name) and group.kind != "state" else group.kind
    names = COMPONENT_NAMES[kind].get(len(tensors))
    if names is None:
        raise _refusal(
            f"layer {name!r}",
            "the number of tensors is unknown",
            f"{len(tensors)}, of shapes {[tuple(map(int, tensor.shape)) for tensor in tensors]} and strides "
            f"{[tuple(map(int, tensor.stride())) for tensor in tensors]}",
            f"one of {sorted(COMPONENT_NAMES[kind])} for a cache of kind {kind!r}",
            _UNKNOWN,
        )
    views = [_read_tensor(name, component, tensor, group) for component, tensor in zip(names, tensors, strict=True)]
    counts = {
        view.component.name: view.num_kernel_blocks * view.kernel_page_bytes // view.component.page_bytes
        for view in views
    }
    if len(set(counts.values())) > 1:
        odd = next(view for view in views if counts[view.component.name] != counts[views[0].component.name])
        raise _refusal(
            odd.where,
            "components of a layer have unequal numbers of blocks",
            f"{odd.found}, that is {counts[odd.component.name]} blocks",
            f"{counts[views[0].component.name]}, as {views[0].component.name!r} has: {views[0].found}",
            _UNKNOWN,
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
                raise _refusal(
                    views[0].where,
                    "the copies of an indexer do not divide",
                    f"{views[0].found}, that is {held} blocks beside {total} of the attention's",
                    f"as many, or as many times more as a divisor of the context parallel size {group.context_size}",
                    f"Choose decode_context_parallel_size and prefill_context_parallel_size that fit. {_UNKNOWN}",
                )
            views = [_copied(view, copies) for view in views]
        read[name] = views
    return read


def _copied(view: _View, copies: int) -> _View:
    one = view.component
    dense = one.block_stride == one.page_bytes
    if one.num_pieces > 1:
        raise _refusal(
            view.where,
            "copies of an indexer's padded kernel blocks are unknown",
            f"{view.found}: {copies} copies of blocks that are {one.num_pieces} padded pages each",
            "pages without holes",
            _UNKNOWN,
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
        raise _refusal(
            where,
            "the tensor has no pages",
            found,
            "(num_blocks, *page), at least one block and no empty axis",
            _UNKNOWN,
        )
    page, order = _dense_page(where, found, shape[1:], strides[1:], _order_of(where, found, shape, group))
    kernel_page_bytes, kernel_stride = _product(page) * item, strides[0] * item
    if shape[0] > 1 and kernel_stride < kernel_page_bytes:
        raise _refusal(
            where,
            "blocks overlap",
            f"{found}, a block every {kernel_stride} bytes",
            f"at least the page's {kernel_page_bytes}",
            _UNKNOWN,
        )
    if order == "NHD" and len(page) == 3 and page[2] == 16 and page[1] == group.block_size != page[0]:
        raise _refusal(
            where,
            "this is the NZ order of a 310P, but the order is given as ND",
            found,
            f"(num_blocks, {group.block_size}, heads, head size)",
            'Set cache_order to "NZ"',
        )
    ratio, page = _kernel_ratio(where, found, page, order, group)
    if shape[0] < ratio * group.num_blocks:
        raise _refusal(
            where,
            "the tensor has fewer blocks than the engine hands out",
            f"{found}, that is {shape[0]} blocks",
            f"at least {ratio * group.num_blocks} ({group.num_blocks} blocks of {group.block_size} tokens in {ratio} "
            "pages each)",
            f"Start without num_gpu_blocks_override. If that does not help: {_UNKNOWN}",
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
    storage = int(tensor.untyped_storage().data_ptr())
    return _View(where, found, component, kernel_stride, kernel_page_bytes, shape[0], storage)


def _order_of(where: str, found: str, shape: tuple[int, ...], group: GroupSpec) -> str:
    """The order of a page's axes: the engine's word, or the one of those left open that the shape can have."""
    fitting = [order for order in (group.order, *group.open_orders) if _fits(shape, order, group)]
    if group.kind == "state" or not group.open_orders or not fitting:
        return group.order
    if len(fitting) > 1:
        settings = " or ".join(f'"{SETTING_OF_ORDER[order]}"' for order in fitting)
        raise _refusal(
            where,
            "the order of a page's axes is not known",
            f"{found}, which in blocks of {group.block_size} tokens fits {' and '.join(fitting)} alike",
            "a shape that fits one of them, or to be told",
            f"Set cache_order to {settings}, as the engine has it",
        )
    # A 310P's order is refused with its own words, if nobody has configured it.
    return group.order if fitting == ["NZ"] else fitting[0]


def _fits(shape: tuple[int, ...], order: str, group: GroupSpec) -> bool:
    """Whether pages of this shape can be in this order: whole blocks of more than one token, and enough of them."""
    page = shape[1:]
    if order == "NZ":
        return len(page) == 3 and page[2] == 16 and page[1] == group.block_size
    if order != "NHD" and len(page) != len(order):
        return False
    tokens = page[order.index("N")]
    if group.block_size % tokens or tokens < min(2, group.block_size):
        return False
    return shape[0] >= group.block_size // tokens * group.num_blocks


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
                raise _refusal(
                    where,
                    "the page has a hole that is unknown",
                    found,
                    f"a page whose {_product(page)} elements follow each other; only between pages may bytes be unused",
                    _UNKNOWN,
                )
            expected *= page[axis]
    if axes != sorted(axes):
        if len(page) != len(order):
            raise _refusal(
                where,
                "the page's axes are permuted and their meaning is unknown",
                f"{found}, order {order!r}",
                f"{len(order)} axes in each page, or axes in the order of memory",
                _UNKNOWN,
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
            raise _refusal(
                where,
                "kernel blocks in NZ order are not supported",
                f"{found}, {tokens} tokens a page in NZ order",
                f"the block size {group.block_size}",
                f'Start with --block-size {tokens}, or set cache_order to "ND" if the pages are not in NZ order',
            )
        return 1, page
    axis = order.index("N")
    tokens = page[axis] if axis < len(page) else 0
    if not tokens or group.block_size % tokens:
        raise _refusal(
            where,
            "the blocks of a group do not divide into pages",
            f"{found}, {tokens} tokens a page in order {order!r}",
            f"a divisor of the block size {group.block_size}",
            "Start with a --block-size that is a multiple of it, or set cache_order if the axes have another order",
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
        raise _refusal(
            f"{first.where} and {second.where}",
            "they overlap, and neither covers the other's pages",
            f"{first.found}, pages of {first.kernel_page_bytes} bytes every {first.kernel_stride} from "
            f"{first.component.base_address:#x}, and {second.found}, pages of {second.kernel_page_bytes} bytes every "
            f"{second.kernel_stride} from {second.component.base_address:#x}",
            "disjoint pages, one view that covers a layer's others, or the very same tensors in two layers",
            _UNKNOWN,
        )


def _refusal(where: str, problem: str, found: str, expected: str, remedy: str) -> LayoutError:
    """In one form: layer and component, what is wrong, shape and strides, what would be right, what to do.

    `problem` is a fixed text: docs/troubleshooting.md explains it.
    """
    return LayoutError(f"{where}: {problem}: found {found}; expected {expected}. {remedy}")


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
