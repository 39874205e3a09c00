"""`python -m tests.docs.configuration`: write the tables of `docs/configuration.md` from the schema of the settings,
each between `<!-- settings: RECORD FIRST LAST -->` and `<!-- end of settings -->`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvpool_connector.config import GIB, MIB, PoolSettings, StoreSettings

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
RECORDS = {record.__name__: record for record in (PoolSettings, StoreSettings)}
TABLE = re.compile(r"(<!-- settings: (\w+) (\w+) (\w+) -->\n)(.*?)(<!-- end of settings -->)", re.DOTALL)
TYPES = {"boolean": "`true`, `false`", "string": "text", "array": "list", "integer": "integer", "number": "number"}
LIMITS = {"exclusiveMinimum": "above", "minimum": "from", "maximum": "to"}


def code(value: object) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def values(schema: dict[str, Any]) -> str:
    """What a setting may be: choices, or a type and its limits."""
    if "anyOf" in schema:
        return ", ".join(values(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return ", ".join(map(code, schema.get("enum", [schema.get("const")])))
    limits = [f"{word} {schema[key]}" for key, word in LIMITS.items() if key in schema]
    return " ".join([schema.get("format", TYPES[schema["type"]]), *limits])


def default(schema: dict[str, Any]) -> str:
    """As it may be written: a size in the largest unit that divides it."""
    value = schema.get("default", ...)
    words = {...: "required", None: "none", "": "empty"}
    if value in words:
        return words[value]
    if schema.get("format") == "size":
        return code(f"{value // GIB}GB" if value % GIB == 0 else f"{value // MIB}MB")
    return code(f"{value:g}" if isinstance(value, float) else value)


def page(text: str) -> str:
    def table(found: re.Match[str]) -> str:
        fields = RECORDS[found[2]].model_json_schema()["properties"]
        keys = list(fields)
        rows = ["| key | values | default | meaning |\n|---|---|---|---|"]
        for key in keys[keys.index(found[3]) : keys.index(found[4]) + 1]:
            meaning = " ".join(fields[key]["description"].split())
            rows.append(f"| `{key}` | {values(fields[key])} | {default(fields[key])} | {meaning} |")
        return "\n".join([found[1], *rows, "", found[6]])

    return TABLE.sub(table, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
