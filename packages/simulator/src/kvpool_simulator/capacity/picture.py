"""Outcomes as a table and as a plot (SVG)."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from kvpool_simulator.capacity.replay import Outcome

WIDTH, HEIGHT, MARGIN = 640, 360, 56
COLOURS = ("#0b6e99", "#d9730d", "#0f7b6c", "#ad1a72", "#6940a5")


def in_units(num_bytes: float) -> str:
    """`1099511627776` as `1 TiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a pool size and number of instances."""
    head = ("instances", "pool", "hit rate", "by the pool", "loaded", "saved", "evicted", "refused", "prefill saved")
    rows = [
        (
            str(o.fleet.instances),
            in_units(o.fleet.pool_bytes),
            f"{o.hit_rate:.1%}",
            f"{o.pool_rate:.1%}",
            in_units(o.loaded_bytes),
            in_units(o.saved_bytes),
            str(o.evicted),
            str(o.refused),
            f"{o.saved_prefill_s:.0f} s",
        )
        for o in outcomes
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)
    )


def plot(outcomes: Sequence[Outcome], title: str) -> str:
    """Hit rate over pool size, a line for each number of instances."""
    sizes = sorted({o.fleet.pool_bytes for o in outcomes})
    places = {size: MARGIN + (WIDTH - 2 * MARGIN) * i / max(1, len(sizes) - 1) for i, size in enumerate(sizes)}

    def height(rate: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * rate

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/><text x="{MARGIN}" y="24">{escape(title)}</text>',
    ]
    for percent in range(0, 101, 20):
        y = height(percent / 100)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>')
    for size, x in places.items():
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{in_units(size)}</text>')
    for i, instances in enumerate(sorted({o.fleet.instances for o in outcomes})):
        colour = COLOURS[i % len(COLOURS)]
        points = sorted((o.fleet.pool_bytes, o.hit_rate) for o in outcomes if o.fleet.instances == instances)
        line = " ".join(f"{places[size]:.1f},{height(rate):.1f}" for size, rate in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{places[size]:.1f}" cy="{height(rate):.1f}" r="3" fill="{colour}"/>' for size, rate in points
        ]
        label = f"{instances} engine{'s' if instances > 1 else ''}"
        parts.append(
            f'<text x="{WIDTH - MARGIN + 4}" y="{height(points[-1][1]) + 4:.1f}" fill="{colour}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
