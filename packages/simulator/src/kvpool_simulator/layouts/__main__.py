"""`python -m kvpool_simulator.layouts DIRECTORY`: write `layouts.md` and the pictures it shows."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpool_simulator.layouts.page import files


def main(arguments: list[str] | None = None) -> None:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(prog="python -m kvpool_simulator.layouts", description=__doc__)
    parser.add_argument("directory", type=Path, help="the documentation's directory, such as docs")
    directory: Path = parser.parse_args(arguments).directory
    wanted = files()
    pictures = directory / "layouts"
    pictures.mkdir(parents=True, exist_ok=True)
    for stale in pictures.glob("*.svg"):
        if f"layouts/{stale.name}" not in wanted:
            stale.unlink()
    for name, text in wanted.items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
