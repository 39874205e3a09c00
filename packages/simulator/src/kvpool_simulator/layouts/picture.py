"""One page of a layout as a picture (SVG): where each component's bytes of a block lie, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from kvpool_simulator.device.caches import FRACTAL_COLUMNS
from kvpool_simulator.device.spec import CacheSpec, Component, Order, RawTensor, Region, View
from kvpool_simulator.layouts.rows import Row

WIDTH, LEFT, PAGE = 1080, 360, 420
"""Pixels of the picture, of its left column, and of the largest page."""
LINE, BAR = 44, 26
LETTER = 6.5
"""Pixels of a letter, about."""
SMALLEST = 10
"""Pixels of the smallest page: what is smaller is drawn too large."""
COLOURS = ("#0b6e99", "#d9730d", "#0f7b6c", "#ad1a72")
HOLE, NEIGHBOUR = "#f3f3f3", "#d5dde3"


@dataclass
class _Drawing:
    """Elements so far, and how far down they reach."""

    y: int = 0
    elements: list[str] = field(default_factory=list)

    def rect(self, x: float, width: float, fill: str, *, dashed: bool = False) -> None:
        stroke = ' stroke="#555" stroke-dasharray="4 3"' if dashed else ' stroke="white"'
        self.elements.append(
            f'<rect x="{x:.1f}" y="{self.y}" width="{width:.1f}" height="{BAR}" fill="{fill}"{stroke}/>'
        )

    def text(self, x: float, dy: int, text: str, more: str = "") -> None:
        self.elements.append(f'<text x="{x:.1f}" y="{self.y + dy}"{more}>{escape(text)}</text>')

    def ticks(self, x: float, width: float, count: int) -> None:
        for i in range(1, min(count, 8)):
            at = x + width * i / min(count, 8)
            self.elements.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{self.y}" y2="{self.y + BAR}" stroke="white" opacity="0.5"/>'
            )


def svg(row: Row) -> str:
    """The picture of `row`: the same text for the same layout, always."""
    drawing = _Drawing(y=16)
    largest = max(region.page_stride * region.kernel_blocks for region, _ in row.views)
    groups = {entry.layer_name: entry.group for entry in row.spec.entries}
    for raw in row.spec.raw_tensors:
        _raw_tensor(drawing, raw, row.spec, PAGE / largest, groups)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {drawing.y}" width="{WIDTH}" '
        f'font-family="sans-serif" font-size="12">'
    )
    title = f"<title>{escape(row.title)}</title>"
    ground = f'<rect width="{WIDTH}" height="{drawing.y}" fill="white"/>'
    return "\n".join([head, title, ground, *drawing.elements, "</svg>", ""])


def _raw_tensor(drawing: _Drawing, raw: RawTensor, spec: CacheSpec, scale: float, groups: dict[str, int]) -> None:
    several = len(set(groups.values())) > 1
    start = "starts on a 2 MiB boundary" if raw.aligned else "on no 2 MiB boundary"
    names = [_region_name(region) for region in raw.regions]
    order = f": over all blocks {', then '.join(names)}" if len(names) > 1 else ""
    drawing.text(8, 12, f"raw tensor {spec.raw_tensors.index(raw) + 1}, {start}{order}", ' font-weight="bold"')
    drawing.y += 22
    for region in raw.regions:
        # Layers of several groups lie on the same pages: one line each.
        by_group: dict[int, list[View]] = {}
        for view in region.views:
            by_group.setdefault(groups[view.layer_name], []).append(view)
        for group, views in by_group.items():
            own = [view for view in views if not view.alias]
            _line(drawing, region, own, scale, f"group {group}: " if several else "")
            for view in views:
                if view.alias:
                    _line(drawing, region, [view], scale, "again: ", alias=True)


def _region_name(region: Region) -> str:
    names = dict.fromkeys(view.component.name for view in region.views)
    return " or ".join(names) or "unused bytes"


def _line(
    drawing: _Drawing, region: Region, views: list[View], scale: float, prefix: str, *, alias: bool = False
) -> None:
    """The pages of one block between those of its neighbours."""
    width = max(SMALLEST, region.page_stride * scale)
    for i, view in enumerate(views):
        drawing.text(8, 11 + 14 * i, f"{prefix}{_words(view.component, region)}")
    drawing.rect(LEFT - 34, 30, NEIGHBOUR)
    drawing.text(LEFT - 30, 17, "b-1", ' fill="#555"')
    for block in range(region.kernel_blocks):
        left = LEFT + block * width
        drawing.rect(left, width, HOLE)
        for i, view in enumerate(views):
            component = view.component
            at = left + width * view.page_offset / region.page_stride
            size = max(2.0, width * component.kernel_bytes / region.page_stride)
            drawing.rect(at, size, "none" if alias else COLOURS[i % len(COLOURS)], dashed=alias)
            if not alias and size > 100:
                count, brief, long = _order(component)
                drawing.ticks(at, size, count)
                drawing.text(at + 6, 17, long if size > LETTER * len(long) else brief, ' fill="white"')
        end = max([0, *(view.page_offset + view.component.kernel_bytes for view in views)])
        if (hole := region.page_stride - end) and not alias and width * hole / region.page_stride > 60:
            drawing.text(left + width * end / region.page_stride + 6, 17, "hole", ' fill="#555"')
    right = LEFT + region.kernel_blocks * width
    drawing.rect(right + 4, 30, NEIGHBOUR)
    drawing.text(right + 8, 17, "b+1", ' fill="#555"')
    drawing.text(right + 42, 17, _sizes(region, views), ' fill="#555"')
    drawing.y += max(LINE, 20 + 14 * len(views))


def _words(component: Component, region: Region) -> str:
    pages = f"{region.kernel_blocks}·NB" if region.kernel_blocks > 1 else "NB"
    shape = ", ".join([pages, *map(str, component.shape)])
    return f"{component.name} {dtype_name(component)} [{shape}]"


def _order(component: Component) -> tuple[int, str, str]:
    """How many parts a page has, and what they are, briefly and at length."""
    if component.num_tokens == 0:
        return 1, "state", "a state"
    tokens = f"{component.num_tokens} tokens"
    if component.order is Order.NZ:
        columns = component.kernel_bytes // (component.num_tokens * FRACTAL_COLUMNS * component.dtype.itemsize)
        return columns, f"NZ: {columns} columns", f"NZ: {columns} columns of 16, each of {tokens}"
    return component.num_tokens, tokens, f"{tokens}, one after the other"


def _sizes(region: Region, views: list[View]) -> str:
    sizes = " + ".join(f"{view.component.kernel_bytes:,}" for view in views) or "0"
    times = f"{region.kernel_blocks} x " if region.kernel_blocks > 1 else ""
    used = sum(view.component.kernel_bytes for view in views)
    return f"{times}({sizes} of {region.page_stride:,} B)" if used != region.page_stride else f"{times}{sizes} B"


def dtype_name(component: Component) -> str:
    """`bfloat16`, without torch's prefix."""
    return str(component.dtype).removeprefix("torch.")
