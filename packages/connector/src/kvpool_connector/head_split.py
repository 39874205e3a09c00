"""Splits what a rank holds by KV heads, so that deployments of other tensor parallel sizes find the same objects.

A part is a layout like any other: of each page the runs of bytes that belong to its heads.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvpool_connector.contract.errors import LayoutError
from kvpool_connector.contract.layout import Component, Layer, ShardLayout

NZ_COLUMN = 16
"""Elements of one column of a 310P's page, `(columns, block_size, 16)`; each head has columns of its own."""


def split_heads(layout: ShardLayout, num_heads: int, heads_per_shard: int) -> list[ShardLayout]:
    """The layout of each shard: heads `i * heads_per_shard ..` of the `num_heads` that `layout` holds, in order.

    Shards of one head say their pages `(block_size, 1, head_dim)` in order `NHD`, however the rank's axes lie: the
    bytes are the same. Raises `LayoutError` for a component whose head axis is not known or whose pages cannot be cut.
    """
    return [
        replace(
            layout,
            layers=tuple(
                replace(
                    layer,
                    components=tuple(_part(layer, c, first, heads_per_shard, num_heads) for c in layer.components),
                )
                for layer in layout.layers
            ),
        )
        for first in range(0, num_heads, heads_per_shard)
    ]


def _part(layer: Layer, whole: Component, first: int, count: int, num_heads: int) -> Component:
    """Heads `first .. first + count - 1` of the component's `num_heads`."""
    axis = _head_axis(whole, num_heads)
    if axis is None:
        if count == num_heads:
            return whole
        raise _refusal(layer, whole, num_heads, f"an axis of {num_heads} heads")
    rows = math.prod(whole.page_shape[:axis])
    row_bytes = whole.page_bytes // rows
    head_bytes = row_bytes // num_heads
    stride = whole.piece_stride
    if whole.num_pieces == 1:
        stride = row_bytes
    elif whole.num_pieces != rows:
        if count == num_heads:
            return whole if count > 1 else _one_head(whole, axis)
        raise _refusal(layer, whole, num_heads, f"pages without holes, or one hole after each row of {num_heads} heads")
    dense = rows == 1 or count * head_bytes == stride
    shape = list(whole.page_shape)
    shape[axis] = shape[axis] // num_heads * count
    part = replace(
        whole,
        page_shape=tuple(shape),
        base_address=whole.base_address + first * head_bytes,
        piece_bytes=count * head_bytes * (rows if dense else 1),
        num_pieces=1 if dense else rows,
        piece_stride=0 if dense else stride,
    )
    return _one_head(part, axis) if count == 1 else part


def _head_axis(component: Component, num_heads: int) -> int | None:
    """The page's axis along which heads follow each other."""
    shape, order = component.page_shape, component.order
    if order == "NZ":
        fractal = len(shape) == 3 and shape[2] == NZ_COLUMN and shape[1] > 1 and shape[0] % num_heads == 0
        return 0 if fractal else None
    axis = len(shape) - len(order) + order.index("H")
    return axis if len(shape) >= len(order) and shape[axis] == num_heads else None


def _one_head(component: Component, axis: int) -> Component:
    """The same bytes in the words that every order of axes has in common."""
    order = component.order.replace("H", "")
    if order != "ND":
        return component
    others = [size for i, size in enumerate(component.page_shape) if i != axis]
    return replace(component, page_shape=(math.prod(others[:-1]), 1, others[-1]), order="NHD")


def _refusal(layer: Layer, component: Component, num_heads: int, expected: str) -> LayoutError:
    return LayoutError(
        f"layer {layer.label}, component {component.name!r}: a page of shape {component.page_shape} in order "
        f"{component.order!r}, {component.num_pieces} runs of {component.piece_bytes} bytes every "
        f"{component.piece_stride}, cannot be split by its {num_heads} KV heads; expected {expected}. Set "
        'kv_head_split to "rank"'
    )
