"""Run by an environment's python: everything that is installed there is pinned, at the version that is installed.

`python ci/check_pins.py CONSTRAINTS`; prints what is not as pinned, ready to paste, and exits with 1 when there is any.
Our own packages are installed from the checkout and are not pinned.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

OURS = {"kvpool-connector", "kvpool-simulator", "kvpool-conformance"}


def normal(name: str) -> str:
    """A distribution's name as packaging compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Version by name of a constraints file. Raises `ValueError` on a line that is no exact pin."""
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        pin = line.split("#")[0].strip()
        if not pin:
            continue
        name, equals, version = pin.partition("==")
        if not equals:
            raise ValueError(f"line {number}: {pin!r} is no pin; expected NAME==VERSION")
        found[normal(name)] = version
    return found


def unpinned(installed: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """`name==version` of each distribution that the pins miss or contradict; a build's local part (`+cpu`) is free."""
    wrong = []
    for name, version in sorted(installed.items()):
        public = version.partition("+")[0]
        if normal(name) not in OURS and pinned.get(normal(name)) not in (version, public):
            wrong.append(f"{name}=={public}")
    return wrong


def main(constraints: str) -> int:
    """Print what is not as pinned; 1 when there is any."""
    installed = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    wrong = unpinned(installed, pins(Path(constraints).read_text(encoding="utf-8")))
    if wrong:
        print(f"{constraints} lacks, or has another version of:", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
