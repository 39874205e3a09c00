"""`python -m bench [--short] [--only PART ...]`: the table of `docs/performance.md`, and `docs/performance.json`.

`--short` runs fewer repetitions, writes nothing, and fails where a ratio has fallen far behind its target.
Where vLLM is there, the parts are those in the real engine; elsewhere the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from bench import engine, layered_models, lookups, planning, resources, rivals, transfers
from bench.measure import Row

PARTS = {
    "planning": planning.rows,
    "lookups": lookups.rows,
    "transfers": transfers.rows,
    "layers": layered_models.rows,
    "resources": resources.rows,
    "rivals": rivals.rows,
    "engine": engine.rows,
}
IN_THE_ENGINE = {"rivals", "engine"}
"""Parts that need vLLM; its environment has not what the others need."""
PAGE, DATA = Path("docs/performance.md"), Path("docs/performance.json")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
SLACK = 2.0
"""How far a ratio may be behind its target in the short form: machines of continuous integration are noisy."""


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = ["| part | measured | against | median (quartiles) | target | |", "|---|---|---|---|---|---|"]
    for row in rows:
        target = f"≥ {row.at_least:g}" if row.at_least is not None else ""
        target = f"≤ {row.at_most:g}" if row.at_most is not None else target
        verdict = {True: "reached", False: "**not reached**", None: ""}[row.reached]
        ratio = f"{row.median:.3g} ({row.low:.3g} to {row.high:.3g})"
        what = f"{row.what} ({row.note})" if row.note else row.what
        lines.append(f"| {row.area} | {what} | {row.against} | {ratio} | {target} | {verdict} |")
    return "\n".join(lines)


def behind(row: Row, slack: float) -> bool:
    """Whether the ratio is worse than its target by more than the factor `slack`."""
    if row.at_least is not None:
        return row.median < row.at_least / slack
    return row.at_most is not None and row.median > row.at_most * slack


def write(measured: dict[str, list[Row]]) -> None:
    """Put what was measured in the page and in the data; parts that were not measured stay as they were."""
    kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    kept |= {part: [asdict(row) for row in rows] for part, rows in measured.items()}
    DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    all_rows = [Row(**row) for part in PARTS if part in kept for row in kept[part]]
    PAGE.write_text(f"{before}{BEGIN}\n{table(all_rows)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> None:
    """Measure, print, write or judge."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    asked = parser.parse_args()
    measured = {}
    for part in asked.only:
        if (part in IN_THE_ENGINE) != bool(find_spec("vllm")):
            continue
        measured[part] = PARTS[part](asked.short)
        print(table(measured[part]), flush=True)
    if not asked.short:
        write(measured)
        return
    fallen = [row for rows in measured.values() for row in rows if behind(row, SLACK)]
    for row in fallen:
        print(f"fallen: {row.what}: {row.median} against {row.against}, target {row.at_least or row.at_most}")
    sys.exit(bool(fallen))


if __name__ == "__main__":
    main()
