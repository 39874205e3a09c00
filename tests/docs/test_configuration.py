"""The tables of the configuration reference are what the schema of the settings says, and name every setting once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel, Field, create_model

from kvpool_connector.config import PoolSettings, StoreSettings
from tests.docs import configuration

PAGE = configuration.PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
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


def test_the_page_is_current() -> None:
    assert configuration.page(PAGE) == PAGE, "run `python -m tests.docs.configuration`"


def test_every_setting_has_one_row() -> None:
    assert [row[0] for row in ROW.findall(PAGE)] == [*PoolSettings.model_fields, *StoreSettings.model_fields]


@pytest.mark.parametrize("record", [PoolSettings, StoreSettings])
def test_a_default_as_written_is_the_default(record: type[BaseModel]) -> None:
    """Read as a user would write it: a text is a text, all else is JSON."""
    needed = {"master_server_address": "127.0.0.1:1"} if record is StoreSettings else {}
    for key, _, shown, _ in ROW.findall(PAGE):
        if key in record.model_fields and shown.startswith("`"):
            text = shown.strip("`")
            value = json.loads(text) if re.fullmatch(r"[\d.]+|true|false", text) else text
            assert getattr(record.model_validate({**needed, key: value}), key) == record.model_fields[key].default, key


def test_another_schema_is_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = create_model(
        "PoolSettings", __base__=PoolSettings, audit_every=(int, Field(7, ge=2, le=9, description="Other\n  words."))
    )
    monkeypatch.setitem(configuration.RECORDS, "PoolSettings", changed)
    new = set(configuration.page(PAGE).splitlines()) - set(PAGE.splitlines())
    assert new == {"| `audit_every` | integer from 2 to 9 | `7` | Other words. |"}


def test_a_table_changed_by_hand_is_put_right() -> None:
    assert configuration.page(PAGE.replace("| `256MB` |", "| `255MB` |")) == PAGE
