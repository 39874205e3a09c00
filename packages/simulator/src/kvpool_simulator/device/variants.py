"""Ways in which any caches may be laid out otherwise: padded, in kernel blocks, in one storage, shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvpool_simulator.device.spec import CacheSpec, Entry, Order, Region


def padded(spec: CacheSpec, padding: int) -> CacheSpec:
    """The same pages, each followed by a hole of `padding` bytes: block stride and block bytes become two numbers."""
    return _each_region(spec, lambda region: replace(region, page_stride=region.page_stride + padding))


def in_kernel_blocks(spec: CacheSpec, kernel_blocks: int) -> CacheSpec:
    """The same tokens, with `kernel_blocks` blocks in dimension 0 for each block of the manager."""
    return _each_region(spec, lambda region: _cut(region, kernel_blocks))


def in_one_storage(spec: CacheSpec, name: str = "all layers") -> CacheSpec:
    """All raw tensors in one storage, so that they are registered at once."""
    if len({raw.aligned for raw in spec.raw_tensors}) > 1:
        raise ValueError("one storage cannot hold raw tensors on the 2 MiB grid and others off it: split the spec")
    return replace(spec, raw_tensors=tuple(replace(raw, storage=name) for raw in spec.raw_tensors))


def sharing(spec: CacheSpec, layer_name: str, owner: str) -> CacheSpec:
    """One more entry, which registers the tensors of `owner` a second time."""
    for entry in spec.entries:
        if entry.layer_name == owner:
            again = Entry(layer_name, entry.container, entry.group, same_as=owner)
            return replace(spec, entries=(*spec.entries, again))
    raise ValueError(f"no entry is called {owner!r}: have {[entry.layer_name for entry in spec.entries]}")


def _cut(region: Region, kernel_blocks: int) -> Region:
    views = []
    for view in region.views:
        old = view.component
        if len(region.views) > 1 or old.order is not Order.ND or old.heads_first or old.num_tokens == 0:
            raise ValueError(
                f"{view.layer_name} {old.name}: only token-major pages of one view have kernel blocks here"
            )
        if old.num_tokens % kernel_blocks:
            raise ValueError(
                f"{view.layer_name} {old.name}: {old.num_tokens} tokens do not make {kernel_blocks} blocks"
            )
        tokens = old.num_tokens // kernel_blocks
        views.append(replace(view, component=replace(old, shape=(tokens, *old.shape[1:]), num_tokens=tokens)))
    if region.page_stride % kernel_blocks:
        raise ValueError(f"a page of {region.page_stride} bytes does not make {kernel_blocks} kernel blocks")
    stride = region.page_stride // kernel_blocks
    return replace(region, page_stride=stride, views=tuple(views), kernel_blocks=region.kernel_blocks * kernel_blocks)


def _each_region(spec: CacheSpec, change: Callable[[Region], Region]) -> CacheSpec:
    raws = tuple(replace(raw, regions=tuple(map(change, raw.regions))) for raw in spec.raw_tensors)
    return replace(spec, raw_tensors=raws)
