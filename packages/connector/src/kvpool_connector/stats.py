"""What the connector counts, and under which names and labels a monitoring system sees it. Nothing of vLLM in here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvpool_connector.contract.status import Status


@dataclass(frozen=True)
class Family:
    """Counts that a monitoring system sees under one name, told apart by one label with a fixed set of values."""

    name: str
    """Without the `_total` that Prometheus' client appends."""
    meaning: str
    counts: Mapping[str, str]
    """Value of the label `result` by the name of the count in `Counters`."""


def _by_status(prefix: str, *but: Status) -> dict[str, str]:
    return {f"{prefix}_{status.value}": status.value for status in Status if status not in but}


def _dropped(*faults: str) -> dict[str, str]:
    return {f"save_blocks_dropped_{fault}": f"dropped_{fault}" for fault in faults}


FAMILIES = (
    Family(
        "kvpool_lookups",
        "Lookups of a prompt by outcome.",
        {f"lookups_{result}": result for result in ("hit", "miss", "unanswered", "short", "below")},
    ),
    Family("kvpool_lookup_keys", "Keys that lookups asked for.", {"lookup_keys": "asked"}),
    Family("kvpool_lookup_hit_tokens", "Tokens that lookups found in the pool.", {"lookup_hit_tokens": "hit"}),
    Family(
        "kvpool_tokens",
        "Tokens of requests that the engine took up after a lookup, by where their KV comes from.",
        {f"tokens_{source}": source for source in ("engine", "pool", "computed")},
    ),
    Family(
        "kvpool_tokens_failed",
        "Tokens counted as the pool's whose load failed, in part or whole.",
        {"tokens_failed": "failed"},
    ),
    Family("kvpool_load_blocks", "Blocks of ended loads by status, on each rank.", _by_status("load_blocks")),
    Family(
        "kvpool_load_time_us",
        "Microseconds from the start of loads to their end as the engine sees it, on each rank.",
        {"load_time_us": "all"},
    ),
    Family(
        "kvpool_save_blocks",
        "Blocks given to be saved by outcome, on each rank.",
        {
            "save_blocks_stored": "stored",
            "save_blocks_present": "present",
            "save_blocks_failed": "failed",
            **_by_status("save_blocks", Status.OK, Status.EXISTS, Status.WITHDRAWN, Status.DEVICE_LATE),
            **_dropped(
                "queue_full",
                "overwritten",
                "outage",
                "device_late",
                "step_broken",
                "hooks",
                "failed",
                "stale",
                "incomplete",
                "lost",
            ),
        },
    ),
    Family(
        "kvpool_bytes",
        "Bytes read from and written to the pool in blocks that were loaded and stored, on each rank.",
        {"load_bytes": "loaded", "save_bytes": "stored"},
    ),
    Family(
        "kvpool_save_queue_blocks",
        "Blocks that entered and left the queue of saves, on each rank; the difference waits.",
        {"save_queue_entered": "entered", "save_queue_left": "left"},
    ),
    Family(
        "kvpool_audit_blocks",
        "Blocks stored that were to be read back, by outcome, on each rank.",
        {f"audit_blocks_{result}": result for result in ("ok", "lost", "wrong", "others", "unread")},
    ),
    # Apart: the same blocks are among those dropped as overwritten.
    Family(
        "kvpool_save_blocks_withdrawn",
        "Blocks that a save found taken away from it, on each rank.",
        {"save_blocks_withdrawn": "withdrawn"},
    ),
    Family(
        "kvpool_hook_faults",
        "Steps in which a layer's hook was not called exactly once.",
        {"save_hook_faults": "save", "load_hook_faults": "load"},
    ),
)


def labelled(counts: object) -> Iterator[tuple[Family, str, int]]:
    """(family, label, count) of what is known; a name that no family lists is left out, so labels stay bounded.

    What is no growth is left out too: the engine's client raises for a negative one, and a metric must fail no request.
    """
    if not isinstance(counts, Mapping):
        return
    for family in FAMILIES:
        for name, result in family.counts.items():
            count = counts.get(name, 0)
            if type(count) is int and count > 0:
                yield family, result, count
