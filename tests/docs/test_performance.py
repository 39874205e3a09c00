"""What the page on performance shows is what its data say: the table row by row, the pictures to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench import curves, pictures
from bench.__main__ import BEGIN, DATA, END, PAGE, PARTS, table
from bench.measure import Row

ROOT = Path(__file__).parents[2]
CURVES: dict[str, curves.Panels] = json.loads(curves.DATA.read_text(encoding="utf-8"))


def test_the_table_is_the_data() -> None:
    data = json.loads((ROOT / DATA).read_text(encoding="utf-8"))
    rows = [Row(**row) for part in PARTS for row in data.get(part, ())]
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert page.split(BEGIN)[1].split(END)[0] == f"\n{table(rows)}\n"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_its_data_and_the_page_shows_it(name: str) -> None:
    kept = (ROOT / "docs" / f"performance-{name}.svg").read_text(encoding="utf-8")
    assert pictures.svg(name, CURVES[name]) == kept
    assert f"](performance-{name}.svg)" in (ROOT / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_another_number_is_another_picture(name: str) -> None:
    panels = json.loads(json.dumps(CURVES[name]))
    next(iter(next(iter(panels.values())).values()))[0][1] *= 1.1
    assert pictures.svg(name, panels) != pictures.svg(name, CURVES[name])


@pytest.mark.parametrize(
    ("name", "places"),
    [("bandwidth", curves.PAGE_KIB), ("planning", curves.PLAN_TOKENS), ("first-token", curves.PROMPT_TOKENS)],
)
def test_every_curve_has_every_point(name: str, places: tuple[float, ...]) -> None:
    for panel in CURVES[name].values():
        assert len(panel) >= 3
        for points in panel.values():
            assert tuple(where for where, *_ in points) == places
            assert all(0 < low <= median <= high for _, median, low, high in points)


def test_what_a_picture_says_is_text() -> None:
    words = "".join(ElementTree.fromstring(pictures.svg("planning", CURVES["planning"])).itertext())
    assert "blocks seen before" in words and "1,000,000" in words
