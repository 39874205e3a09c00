"""`python -m bench.pictures`: the pictures of `docs/performance.md`, drawn from `docs/performance-curves.json`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.curves import DATA

STYLE = {
    "svg.fonttype": "none",  # Text stays text: it can be searched and read aloud.
    "svg.hashsalt": "kvpool",  # Without, names within the file are random.
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
PANEL_INCHES = (5.0, 3.4)


@dataclass(frozen=True)
class Picture:
    """What the axes say."""

    across: str
    up: str


PICTURES = {
    "bandwidth": Picture("KiB of a buffer", "MB/s over TCP, 8 blocks of 61 x 2 buffers"),
    "planning": Picture("tokens of a request of DeepSeek-V3.2", "processor time of its plan, ms"),
    "first-token": Picture("tokens of the prompt", "time to first token, ms"),
}


def svg(name: str, panels: Mapping[str, Mapping[str, Any]]) -> str:
    """One picture: a panel beside the other, medians as lines with their quartiles; both axes logarithmic."""
    says = PICTURES[name]
    # rc_context alone keeps what was set in between: a file of the user's would change the picture.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        width, height = PANEL_INCHES
        figure = Figure(figsize=(width * len(panels), height), layout="tight")
        several = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (title, curves) in zip(several, panels.items(), strict=True):
            axes.set(title=title, xlabel=says.across, xscale="log", yscale="log")
            for curve, points in curves.items():
                across, median, low, high = zip(*points, strict=True)
                axes.plot(across, median, marker="o", markersize=3, label=curve)
                axes.fill_between(across, low, high, alpha=0.15, linewidth=0)
            places = [point[0] for point in next(iter(curves.values()))]
            axes.set_xticks(places, [f"{place:,g}" if place < 1e6 else f"{place:,.0f}" for place in places])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        several[0].set_ylabel(says.up)
        several[0].legend(frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"


def files() -> dict[str, str]:
    """By name below `docs/`."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return {f"performance-{name}.svg": svg(name, data[name]) for name in PICTURES}


def main() -> None:
    """Draw all."""
    for name, drawn in files().items():
        (DATA.parent / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
