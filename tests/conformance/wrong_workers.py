"""Mistakes of the worker side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvpool_connector import fence, loader, outage, saver, transfer
from kvpool_connector.contract.status import Status
from kvpool_connector.metadata import LoadReport
from kvpool_connector.worker import PoolWorker
from tests.conformance.wrong_sides import plant, wrap

OK = Status.OK

EXACTLY = "test_worker:test_a9_exactly_the_affected_blocks_are_reported_once"


def failure(mistake: str, owner: Any, name: str, wrong: Any, fault: str, position: int = 2) -> None:
    """A mistake in what is made of a failed load."""
    where = {"fault": fault, "position": position, "between_steps": False, "mode": "packed"}
    wrap(mistake, owner, name, wrong, EXACTLY, **where)


def taken_for_success(*codes: Status) -> Callable[..., list[Status]]:
    return lambda right, call, keys, *a: [OK if s in codes else s for s in right(call, keys, *a)]


failure("a short read is taken for success", transfer, "statuses_of", taken_for_success(Status.CORRUPT), "short")
failure(
    "a negative code is taken for success", transfer, "statuses_of", taken_for_success(Status.UNAVAILABLE), "negative"
)
failure(
    "a miss is taken for success",
    transfer,
    "statuses_of",
    lambda right, call, keys, *a: [OK if a and s is Status.MISS else s for s in right(call, keys, *a)],
    "missing",
)


def unchecked(right: Any, call: Any, keys: Sequence[str], *arguments: Any) -> list[Status]:
    try:
        statuses = call(keys, *arguments) or []
    except RuntimeError:
        statuses = []
    return [*statuses, *[OK] * len(keys)][: len(keys)]


for fault in ("none", "exception", "too few"):
    failure(f"an answer out of form ({fault}) is taken for success", transfer, "statuses_of", unchecked, fault)
failure(
    "failed blocks are reported again and again",
    PoolWorker,
    "take_failed_blocks",
    lambda right, self: self._failed_blocks,
    "missing",
)
failure(
    "failed blocks are reported by position, not by id",
    loader.Load,
    "failed_blocks",
    lambda right, self: ([i for i, s in enumerate(self.batches[0][0].result()) if not s.ok], right(self)[1]),
    "missing",
)
failure(
    "a failed load is reported as loaded",
    PoolWorker,
    "take_report",
    lambda right, self: (found := right(self)) and LoadReport(loaded=found.loaded | found.failed),
    "missing",
)
failure(
    "only the first failed block is reported",
    loader.Load,
    "failed_blocks",
    lambda right, self: (right(self)[0][:1], right(self)[1]),
    "exception",
)
LATE = "test_worker:test_a35_late_bytes_never_reach_the_cache"
plant("a late load still writes", loader.Load, "withdraw", lambda self: None, LATE, between_steps=False)
wrap(
    "a load that is late counts as loaded",
    loader.Load,
    "failed_blocks",
    lambda right, self: right(self) if self.done else ([], right(self)[1]),
    LATE,
    between_steps=False,
)
plant(
    "a save reads blocks that were given away",
    fence.Fence,
    "overwrite",
    lambda self, block_ids: 0,
    "test_worker:test_a7_a_queued_save_never_stores_the_next_owners_bytes",
    mode="packed",
)


class Landed:
    """An event that has always happened."""

    def wait(self, timeout_s: float) -> bool:
        return True


wrap(
    "a save does not wait for the device",
    saver.Saver,
    "submit",
    lambda right, self, saves, event: right(self, saves, Landed()),
    "test_worker:test_a5_what_has_not_landed_is_not_stored",
)
plant(
    "what is there is put again",
    transfer,
    "save_missing",
    lambda store, keys, ids, hold, put: put(keys, ids),
    "test_worker:test_c5_only_missing_blocks_are_put",
)


def released_first(right: Any, self: Any, call: Any, keys: Any, ids: Any, hold: Any) -> Any:
    class Early(transfer.Unheld):
        def claim(self, block_ids: Sequence[int]) -> list[bool]:
            granted: list[bool] = hold.claim(block_ids)
            hold.release(block_ids)
            return granted

    return right(self, call, keys, ids, Early())


wrap(
    "a direct put lets go of its blocks before it has read them",
    transfer.DirectTransfer,
    "_held",
    released_first,
    "test_worker:test_a_direct_put_holds_its_blocks_until_it_has_read_them",
)
wrap(
    "the queue of saves has no bound",
    saver.Saver,
    "__init__",
    lambda right, self, transfers, fence, outage, counters, bound, *others: right(
        self, transfers, fence, outage, counters, 1 << 30, *others
    ),
    "test_worker:test_d23_the_queue_is_bounded_and_drops_are_counted",
)
plant(
    "a dead store is asked again and again",
    outage.Outage,
    "active",
    False,
    "test_worker:test_saves_step_aside_while_the_store_is_down",
)
plant(
    "an ended request is never let go",
    PoolWorker,
    "take_saved",
    lambda self: set(),
    "test_worker:test_d10_an_ended_request_is_let_go_within_the_step",
)
wrap(
    "a load writes what the device still writes",
    loader.Loader,
    "start",
    lambda right, self, request_id, loads, event: right(self, request_id, loads, Landed()),
    "test_worker:test_a25_a_load_behind_a_device_that_is_late_fails",
)
plant(
    "a save that was withdrawn counts as an outage",
    transfer,
    "spread",
    lambda granted, statuses: [
        (*statuses, Status.TIMEOUT)[sum(granted[:i]) if g else -1] for i, g in enumerate(granted)
    ],
    "test_worker:test_a_withdrawn_save_is_no_outage",
    mode="packed",
)
wrap(
    "a load without an answer says nothing of the store",
    outage.Outage,
    "note",
    lambda right, self, statuses: right(self, [status for status in statuses if status is not Status.TIMEOUT]),
    "test_worker:test_d15_a_load_that_is_late_is_an_outage_before_the_store_answers",
)
