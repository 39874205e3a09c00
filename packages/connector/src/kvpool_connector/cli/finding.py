"""One thing that `doctor` looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvpool_connector.contract.errors import KVPoolError


class Level(Enum):
    """How bad it is."""

    WELL = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "not checked"


@dataclass(frozen=True)
class Finding:
    """What was found, why it matters and what exactly to do; the latter two are empty where all is well."""

    check: str
    level: Level
    what: str
    why: str = ""
    remedy: str = ""


def well(check: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Level.WELL, what)


def skipped(check: str, what: str) -> Finding:
    """It could not be looked at, because of something that another finding names."""
    return Finding(check, Level.SKIPPED, what)


def warning(check: str, what: str, why: str, remedy: str) -> Finding:
    """Serving works, and somebody will be disappointed."""
    return Finding(check, Level.WARNING, what, why, remedy)


def error(check: str, what: str, why: str, remedy: str) -> Finding:
    """Serving fails, or never hits."""
    return Finding(check, Level.ERROR, what, why, remedy)


def attempt(check: str, look: Callable[[], Finding], why: str) -> Finding:
    """What `look` finds; an error, whose message names the remedy, is a finding too."""
    try:
        return look()
    except KVPoolError as failure:
        return error(check, type(failure).__name__, why, str(failure))
