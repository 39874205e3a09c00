"""Mistakes with checksums."""

from __future__ import annotations

from typing import Any

from kvpool_connector import integrity, transfer
from kvpool_connector.contract.status import Status
from tests.conformance.wrong_sides import plant, wrap

ALONE = "test_integrity:test_b6_a_broken_object_is_reported_alone_and_removed"

plant("checksums are not compared", integrity.Integrity, "broken", lambda self, *_: [], ALONE)
plant("no checksums are written", integrity.Integrity, "seal", lambda self, *_: None, ALONE)
wrap(
    "one broken object condemns its neighbours",
    integrity.Integrity,
    "broken",
    lambda right, self, keys, loaded, *at: list(loaded) if right(self, keys, loaded, *at) else [],
    ALONE,
)
wrap(
    "a broken object is reported in its neighbour's place",
    integrity.Integrity,
    "broken",
    lambda right, *a: [i + 1 for i in right(*a)],
    ALONE,
)


def left_there(right: Any, call: Any, keys: Any, *arguments: Any) -> list[Status]:
    """All calls but the removal, which comes as a partial."""
    return right(call, keys, *arguments) if arguments or not keys or hasattr(call, "__name__") else []


wrap("a broken object stays in the store", transfer, "statuses_of", left_there, ALONE)
