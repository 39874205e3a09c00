"""Bars as a picture (SVG), drawn by hand: a plotting library would be larger than the connector."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, ROW, NAMES, MARGIN = 720, 26, 190, 16
COLOURS = ("#d9730d", "#0b6e99")
"""Of every other bar."""


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """One bar for each `(name, size, size in words)`, all to one scale."""
    room = WIDTH - NAMES - 6 * MARGIN
    best = max(size for _, size, _ in rows)
    height = (len(rows) + 1) * ROW + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 13}" font-weight="bold">{escape(title)}</text>',
    ]
    for i, (name, size, words) in enumerate(rows):
        top, long = MARGIN + (i + 1) * ROW, max(1.0, room * size / best)
        parts.append(f'<text x="{NAMES}" y="{top + 16}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect x="{NAMES + 8}" y="{top + 3}" width="{long:.1f}" height="{ROW - 8}" fill="{COLOURS[i % 2]}"/>'
        )
        parts.append(f'<text x="{NAMES + 14 + long:.1f}" y="{top + 16}">{escape(words)}</text>')
    return "\n".join([*parts, "</svg>", ""])
