"""The page of layouts and its pictures are what the simulator's models say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool_simulator.device import variants
from kvpool_simulator.layouts import ROWS, files, page, svg
from kvpool_simulator.layouts.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_and_its_pictures_are_current() -> None:
    wanted = files()
    found = {name: (DOCS / name).read_text(encoding="utf-8") for name in wanted if (DOCS / name).exists()}
    stale = sorted(name for name in wanted if found.get(name) != wanted[name])
    assert not stale, f"run `python -m kvpool_simulator.layouts docs`: {stale}"
    assert {f"layouts/{path.name}" for path in (DOCS / "layouts").iterdir()} == set(wanted) - {"layouts.md"}


def test_the_command_writes_them_and_removes_what_is_stale(tmp_path: Path) -> None:
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "gone.svg").touch()
    main([str(tmp_path)])
    found = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.*")}
    assert {name: path.read_text(encoding="utf-8") for name, path in found.items()} == files()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_picture_says_every_tensor_and_stays_in_its_frame(row: page.Row) -> None:
    root = ElementTree.fromstring(svg(row))
    space = "{http://www.w3.org/2000/svg}"
    texts = "\n".join(text.text or "" for text in root.iter(f"{space}text"))
    for _, view in row.views:
        assert f"{view.component.name} {str(view.component.dtype).removeprefix('torch.')} [" in texts
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    for rect in root.iter(f"{space}rect"):
        x, y, w, h = (float(rect.attrib.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height


def test_another_layout_is_another_page_and_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(ROWS[0], spec=variants.padded(ROWS[0].spec, 64))
    monkeypatch.setattr(page, "ROWS", (changed, *ROWS[1:]))
    assert {name for name, text in files().items() if text != (DOCS / name).read_text(encoding="utf-8")} == {
        "layouts.md",
        f"layouts/{changed.name}.svg",
    }
