"""A page that shows the dashboard's panels as Grafana lays them out, from what Prometheus answers to their queries."""

from __future__ import annotations

import html
import json
import urllib.parse
import urllib.request
from typing import Any

COLOURS = ("#3a7", "#36c", "#c63", "#a3a", "#993", "#c33", "#39b", "#777", "#6a2", "#b58")
CELL, ROW, MARGIN = 56, 30, 46
"""Pixels of a column and a row of Grafana's grid, and left of a picture for the scale."""
STEP_S = 1.0
Series = list[tuple[float, float]]


def ask(prometheus: str, expression: str, start: float, end: float, step: float, window: str) -> dict[str, Series]:
    """Points by legend labels, of an expression as the dashboard has it. Raises `RuntimeError` when it is refused."""
    text = expression.replace("$model", ".*").replace("$__rate_interval", window)
    query = urllib.parse.urlencode({"query": text, "start": start, "end": end, "step": step})
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}", timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"Prometheus refuses {text!r}: {error.read().decode()}") from error
    return {
        one["metric"].get("result", ""): [(float(at), float(value)) for at, value in one["values"] if value != "NaN"]
        for one in found
    }


def panel_series(prometheus: str, panel: dict[str, Any], *span: Any) -> dict[str, Series]:
    """All lines of a panel by their legend; those that are 0 throughout are left out, as nothing would be seen."""
    lines: dict[str, Series] = {}
    for target in panel["targets"]:
        for result, points in ask(prometheus, target["expr"], *span).items():
            if any(value for _, value in points):
                lines[target["legendFormat"].replace("{{result}}", result)] = points
    return lines


def number(value: float, unit: str) -> str:
    """As the scale shows it."""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1e3:.3g} ms"
    if unit == "Bps":
        return f"{value / 1e6:.3g} MB/s"
    return f"{value / 1e3:.3g}k" if value >= 1e3 else f"{value:.3g}"


def unbroken(shape: list[tuple[float, float, float]]) -> list[list[tuple[float, float, float]]]:
    """Points in runs without a missing step: where nothing was measured nothing is drawn."""
    runs: list[list[tuple[float, float, float]]] = []
    for point in shape:
        if not runs or point[0] - runs[-1][-1][0] > 1.5 * STEP_S:
            runs.append([])
        runs[-1].append(point)
    return runs


def picture(panel: dict[str, Any], lines: dict[str, Series], start: float, end: float, width: int, height: int) -> str:
    """An SVG of a panel."""
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    below: dict[float, float] = {}
    shapes: list[tuple[str, list[tuple[float, float, float]]]] = []
    for name, points in lines.items():
        shape = [(at, below.get(at, 0.0) if stacked else 0.0, value) for at, value in points]
        if stacked:
            below.update({at: low + value for at, low, value in shape})
        shapes.append((name, [(at, low, low + value) for at, low, value in shape]))
    top = defaults.get("max") or 1.1 * max((high for _, shape in shapes for _, _, high in shape), default=0) or 1.0

    def place(at: float, value: float) -> str:
        x = MARGIN + (at - start) / (end - start) * (width - MARGIN)
        return f"{x:.1f},{height - value / top * height:.1f}"

    drawn = []
    for part in range(5):
        y = height - part * height / 4
        drawn.append(f'<line x1="{MARGIN}" x2="{width}" y1="{y}" y2="{y}" stroke="#333"/>')
        text = number(top * part / 4, defaults["unit"])
        drawn.append(f'<text x="{MARGIN - 5}" y="{y + 4}" text-anchor="end">{text}</text>')
    for index, (_, shape) in enumerate(shapes):
        colour = COLOURS[index % len(COLOURS)]
        for run in unbroken(shape):
            upper = " ".join(place(at, high) for at, _, high in run)
            if stacked:
                lower = " ".join(place(at, low) for at, low, _ in reversed(run))
                drawn.append(f'<polygon points="{upper} {lower}" fill="{colour}" fill-opacity="0.3"/>')
            drawn.append(f'<polyline points="{upper}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for seconds in range(0, int(end - start) + 1, 30):
        x = MARGIN + seconds / (end - start) * (width - MARGIN)
        drawn.append(f'<text x="{x}" y="{height + 15}" text-anchor="middle">{seconds} s</text>')
    legend = "".join(
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{html.escape(name)}</span>'
        for i, (name, _) in enumerate(shapes)
    )
    svg = f'<svg width="{width + 10}" height="{height + 20}" viewBox="0 -6 {width + 10} {height + 26}">'
    return f"{svg}{''.join(drawn)}</svg><p>{legend or '<span>all zero in this run</span>'}</p>"


def page(dashboard: dict[str, Any], prometheus: str, start: float, end: float) -> tuple[str, int, int]:
    """HTML, and its width and height in pixels."""
    parts = []
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        width, height = at["w"] * CELL - 12, at["h"] * ROW - 12
        lines = panel_series(prometheus, panel, start, end, STEP_S, "5s")
        body = picture(panel, lines, start, end, width - 30, height - 80)
        parts.append(
            f'<div style="left:{at["x"] * CELL + 6}px;top:{at["y"] * ROW + 46}px;width:{width}px;height:{height}px">'
            f"<h2>{html.escape(panel['title'])}</h2>{body}</div>"
        )
    style = (
        "body{margin:0;background:#111217;color:#ccc;font:12px sans-serif}h1{font-size:17px;margin:12px}"
        "h2{font-size:13px;margin:7px 10px 4px}div{position:absolute;background:#181b1f;border:1px solid #2c3035}"
        "svg{margin-left:8px}text{fill:#999;font-size:10px}p{margin:2px 10px}span{margin-right:12px}"
        "i{display:inline-block;width:12px;height:3px;margin-right:5px;vertical-align:middle}"
    )
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    text = f"<!doctype html><meta charset=utf-8><style>{style}</style><h1>{dashboard['title']}</h1>{''.join(parts)}"
    return text, 24 * CELL + 8, bottom * ROW + 56
