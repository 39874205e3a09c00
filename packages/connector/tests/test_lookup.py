"""Lookups end in time, whatever the store does (D15)."""

from __future__ import annotations

import threading

from clocks import ManualClock
from stores import DictStore

from kvpool_connector.contract.status import Status
from kvpool_connector.lookup import StoreLookup
from kvpool_connector.outage import Outage


def test_answers_pass_through() -> None:
    store = DictStore()
    store.objects["a"] = b"x"
    lookup = StoreLookup(store, Outage(ManualClock(), 5), 10)
    assert lookup.exist(["a", "b"]) == [Status.OK, Status.MISS]
    assert lookup.exist([]) == []
    lookup.close()
    assert store.closed


def test_d15_a_hung_store_costs_one_limit_and_then_nothing() -> None:
    store, clock = DictStore(), ManualClock()
    store.gates["exist"] = threading.Event()
    lookup = StoreLookup(store, Outage(clock, 5), timeout_s=0.05)
    assert lookup.exist(["a"]) == [Status.TIMEOUT]
    assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
    clock.time = 6
    assert lookup.exist(["a"]) == [Status.UNAVAILABLE], "the first call still hangs"
    assert len(store.calls) == 1
    store.gates["exist"].set()
    lookup.close()


def test_the_pool_comes_back_by_itself() -> None:
    store, clock = DictStore(), ManualClock()
    lookup = StoreLookup(store, Outage(clock, 5), 10)
    store.answers["exist"] = lambda keys: [Status.UNAVAILABLE] * len(keys)
    assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
    del store.answers["exist"]
    assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
    clock.time = 5
    assert lookup.exist(["a"]) == [Status.MISS]
    assert len(store.calls) == 2
    lookup.close()


def test_a_store_that_raises_is_an_outage_not_an_error() -> None:
    store = DictStore()

    def fail(keys: object) -> list[Status]:
        raise RuntimeError("broken")

    store.answers["exist"] = fail
    lookup = StoreLookup(store, Outage(ManualClock(), 5), 10)
    assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
    lookup.close()
