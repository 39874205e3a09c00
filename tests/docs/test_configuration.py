"""The configuration reference names every setting of the schema, and no other, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from kvpool_connector.config import PoolSettings, StoreSettings, parse_size

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
IN_WORDS = {"none": None, "empty": "", "the model's path": None, "false": False, "true": True}


def rows(record: type[BaseModel]) -> dict[str, str]:
    """Key and default as the page says them, of the section of one record."""
    pool, store = PAGE.split("## `mooncake.json`")
    found: list[tuple[str, str, str]] = ROW.findall(pool if record is PoolSettings else store)
    assert len({key for key, _, _ in found}) == len(found), "a key has two rows"
    return {key: default.strip("`") for key, default, _ in found}


NOT_IN_THE_FILE = {"fabric_memory"}
"""Set by a variable of the environment."""
MOVING = (Path(__file__).parents[2] / "docs" / "moving.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("record", [PoolSettings, StoreSettings])
def test_whoever_moves_finds_every_setting(record: type[BaseModel]) -> None:
    """Each key of vLLM-Ascend's in a row by its name, and each of KVPool's own beside what it is for."""
    named = set(re.findall(r"`(\w+)`", MOVING))
    assert set(record.model_fields) - NOT_IN_THE_FILE <= named
    rows = set(re.findall(r"^\| `(\w+)` \|", MOVING.split("## Settings that only")[0], re.MULTILINE))
    theirs = set(re.findall(r"^\| `(\w+)` \|", PAGE.split("KVPool's own:")[0], re.MULTILINE))
    assert rows == theirs


@pytest.mark.parametrize("record", [PoolSettings, StoreSettings])
def test_every_setting_has_a_row_with_its_default(record: type[BaseModel]) -> None:
    said = rows(record)
    assert set(said) == set(record.model_fields)
    for key, field in record.model_fields.items():
        text = said[key]
        if field.is_required():
            assert text == "required", key
        elif text in IN_WORDS:
            assert field.default == IN_WORDS[text], key
        elif isinstance(field.default, str):
            assert field.default == text, key
        elif text[-1:] == "B":
            assert field.default == parse_size(text), key
        else:
            assert field.default == float(text), key
