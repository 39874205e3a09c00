"""Writes the table of claims in docs/mooncake-semantics.md: `python -m tests.twin.table REPORT`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "mooncake-semantics.md"
BEGIN, END = "<!-- claims -->\n", "<!-- end of claims -->\n"
WORDS = {"passed": "holds", "failed": "**differs**", "skipped": "cannot be shown"}


def rows(claims: dict[str, dict[str, Any]]) -> str:
    """The table of a report's claims."""
    mooncake = version("mooncake-transfer-engine-non-cuda")
    lines = [
        f"| claim | | test | simulator | Mooncake {mooncake} |",
        "|---|---|---|---|---|",
    ]
    for name, claim in sorted(claims.items()):
        test = claim["test"].split("::")[-1]
        results = [WORDS.get(claim["results"].get(target, ""), "not run") for target in ("simulator", "mooncake")]
        lines.append(f"| `{name}` | {claim['text']} | `{test}` | {results[0]} | {results[1]} |")
    return "\n".join(lines) + "\n"


def main(report: str) -> None:
    """Put the table in its place."""
    claims = json.loads(Path(report).read_text(encoding="utf-8"))["claims"]
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{rows(claims)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
