"""What a command says: tables for people, one JSON document for programs, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpool_connector.contract.errors import KVPoolError


class Exit(IntEnum):
    """Exit status of every command."""

    WELL = 0
    LOOK = 1
    """Answered, and somebody should look at the answer."""
    ERROR = 2
    """Bad input, an unreachable store, or an object that is not what its key promises."""


class CommandError(KVPoolError):
    """The command cannot do what was asked; nothing was changed. The message says what to do."""


@dataclass
class Rows:
    """A table: column names and cells."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)


@dataclass
class Answer:
    """What a command found."""

    data: Mapping[str, Any]
    """The JSON document."""
    tables: Sequence[Rows] = ()
    lines: Sequence[str] = ()
    """Sentences after the tables."""
    exit: Exit = Exit.WELL


def show(answer: Answer, *, as_json: bool) -> int:
    """Print an answer to standard output; returns the exit status."""
    if as_json:
        print(json.dumps(answer.data, indent=1, sort_keys=True, default=str))
        return int(answer.exit)
    console = Console(soft_wrap=True, highlight=False)
    for rows in answer.tables:
        table = Table(title=escape(rows.title), title_justify="left", header_style="bold")
        for column in rows.columns:
            table.add_column(column, overflow="fold")
        for row in rows.rows:
            table.add_row(*(escape(printable(cell)) for cell in row))
        console.print(table)
    for line in answer.lines:
        console.print(escape(printable(line)))
    return int(answer.exit)


def show_error(error: Exception, *, as_json: bool) -> int:
    """Print why a command could not be carried out: JSON to standard output, or a sentence to standard error."""
    if as_json:
        print(json.dumps({"error": str(error)}))
    else:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error[/] {escape(printable(error))}")
    return int(Exit.ERROR)


def printable(value: object) -> str:
    """A text for a terminal: foreign keys may hold control characters."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(value))


def in_bytes(count: float) -> str:
    """`1610612736` as `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
