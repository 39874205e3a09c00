"""Every count of the code has a family, a label and a row in docs/metrics.md."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import kvpool_connector
from kvpool_connector.contract.status import Status
from kvpool_connector.stats import FAMILIES

SOURCE = Path(kvpool_connector.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
CALL = re.compile(r"counters\.add\(\s*(f?)\"([^\"]+)\"")
GIVEN_UP = re.compile(
    r"(?:one\.fault = (?:one\.fault or )?|_give_up\([^\n]*, |return |fault = )\"(\w+)\"|else \"(\w+)\""
)


def counted(sources: dict[str, str]) -> set[str]:
    """Names that the sources count, with every value that a placeholder can take."""
    values = {
        "result": {"hit", "miss", "unanswered"},
        "status.value": {status.value for status in Status},
        "fault": {name for found in GIVEN_UP.findall(sources["layer_saver.py"]) for name in found if name},
    }
    names: set[str] = set()
    for text in sources.values():
        for _, name in CALL.findall(text):
            placeholder = re.search(r"\{(.+)\}", name)
            if placeholder is None:
                names.add(name)
            else:
                names |= {name.replace(placeholder[0], value) for value in values[placeholder[1]]}
    # They are taken out of the counts by status, and counted under names of their own.
    return names - {"save_blocks_ok", "save_blocks_exists", "save_blocks_device_late"}


def sources() -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in SOURCE.glob("*.py")}


def listed() -> set[str]:
    return {name for family in FAMILIES for name in family.counts}


def test_every_count_of_the_code_has_a_family_and_no_other() -> None:
    assert counted(sources()) == listed()


def test_a_count_without_a_family_is_found() -> None:
    changed = sources()
    changed["saver.py"] += '\n        self._counters.add("save_blocks_forgotten")\n'
    assert counted(changed) - listed() == {"save_blocks_forgotten"}


def test_the_table_in_the_documentation_is_the_code() -> None:
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `vllm:")
    ]
    assert all(len(row) == 4 and row[2] for row in rows)
    assert Counter((row[0], row[1], row[3]) for row in rows) == Counter(
        (f"vllm:{family.name}_total", result, name) for family in FAMILIES for name, result in family.counts.items()
    )
