"""A reset makes what was stored unreachable, and nothing of before appears after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from clocks import ManualClock
from stores import DictStore
from test_scheduler import Bench, saved
from test_worker import rig

from kvpool_connector.contract.keys import Key, parse_key
from kvpool_connector.contract.status import Status
from kvpool_connector.epoch import MARKERS_PER_CALL, MAX_CALLS, marker, newest_epoch
from kvpool_connector.lookup import Lookup, StoreLookup
from kvpool_connector.lookup_socket import LookupServer, SocketLookup
from kvpool_connector.outage import Outage
from kvpool_connector.scheduler import MAX_MOVES


def bench_with(*blocks: int) -> Bench:
    bench = Bench()
    bench.store(bench.view(65), blocks)
    return bench


def test_what_was_stored_is_a_miss_after_a_reset() -> None:
    bench = bench_with(0, 1)
    assert bench.scheduler.num_matched_tokens(bench.view(65), 0)[0] == 32
    assert bench.scheduler.reset()
    assert bench.scheduler.num_matched_tokens(bench.view(65), 0)[0] == 0
    bench.store(bench.view(65), [0])
    assert bench.scheduler.num_matched_tokens(bench.view(65, "other"), 0)[0] == 16


def test_an_engine_follows_the_resets_of_others_with_its_next_lookup() -> None:
    bench = bench_with(0, 1)
    bench.lookup.present |= {marker("n", epoch) for epoch in range(1, 4)}
    assert bench.scheduler.num_matched_tokens(bench.view(65), 0)[0] == 0
    assert bench.scheduler.epoch == 3
    bench.store(bench.view(65), [0])
    bench.scheduler.allocated(bench.view(65, "a"), [[1, 2, 3, 4, 5]], 0)
    assert bench.scheduler.num_matched_tokens(bench.view(65, "b"), 0)[0] == 16


def test_an_engine_that_only_saves_follows_within_a_second() -> None:
    bench = Bench(loads=False)
    bench.scheduler.num_matched_tokens(bench.view(65), 0)
    bench.lookup.present.add(marker("n", 1))
    bench.scheduler.num_matched_tokens(bench.view(65), 0)
    assert bench.scheduler.epoch == 0
    bench.clock.time += 1
    bench.scheduler.num_matched_tokens(bench.view(65), 0)
    assert bench.scheduler.epoch == 1


def test_a_load_reads_the_epoch_that_was_looked_up() -> None:
    bench = Bench()
    bench.scheduler.reset()
    view = bench.view(65)
    bench.store(view, [0, 1])
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 32)
    (job,) = bench.scheduler.build_step([]).loads
    assert job.epoch == 1


def test_b10_what_was_computed_before_a_reset_is_not_saved_after_it() -> None:
    bench = Bench()
    view = bench.view(65)
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 0)
    jobs = bench.schedule(view, 0, 32, [[1, 2, 3, 4, 5]], True)
    assert [job.epoch for job in jobs] == [0]
    bench.scheduler.reset()
    assert bench.schedule(view, 32, 33, None, False) == ()
    assert not bench.scheduler.finished("r", 71, completed=True)
    # Preempted and begun anew, or another: computed after the reset.
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[6, 7, 8, 9, 10]], 0)
    jobs = bench.schedule(view, 0, 65, [[6, 7, 8, 9, 10]], True)
    assert saved(jobs) == [(0, 6), (0, 7), (0, 8), (0, 9)]
    assert [job.epoch for job in jobs] == [1]


def test_a_request_that_begins_anew_after_a_reset_is_saved_in_the_new_epoch() -> None:
    bench = Bench()
    view = bench.view(65)
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 0)
    bench.schedule(view, 0, 32, [[1, 2, 3, 4, 5]], True)
    bench.scheduler.reset()
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[6, 7, 8, 9, 10]], 0)
    jobs = bench.schedule(view, 0, 65, [[6, 7, 8, 9, 10]], True)
    assert ([job.epoch for job in jobs], len(saved(jobs))) == ([1], 4)


def test_a_load_between_steps_that_a_reset_overtakes_is_not_saved() -> None:
    bench = Bench(load_between_steps=True)
    view = bench.view(65)
    bench.store(view, [0, 1])
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2]], 32)
    bench.scheduler.build_step([])
    bench.scheduler.reset()
    # The load has ended: the engine does not ask again for what it has.
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 0)
    assert bench.schedule(view, 32, 33, [[1, 2, 3, 4, 5]], True) == ()


@pytest.mark.parametrize("fault", ["refused", "lied"])
def test_a_reset_that_the_store_did_not_confirm_is_none_but_holds_here(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_with(0, 1)
    answer = Status.UNAVAILABLE if fault == "refused" else Status.OK
    monkeypatch.setattr(bench.lookup, "mark", lambda key: answer)
    assert not bench.scheduler.reset()
    assert bench.scheduler.num_matched_tokens(bench.view(65), 0)[0] == 0
    monkeypatch.undo()
    assert marker("n", 1) not in bench.lookup.present
    bench.scheduler.num_matched_tokens(bench.view(65, "later"), 0)
    assert marker("n", 1) in bench.lookup.present


def test_a_marker_whose_owner_died_is_written_again() -> None:
    bench = Bench()
    assert bench.scheduler.reset()
    bench.lookup.present.clear()
    bench.scheduler.num_matched_tokens(bench.view(65), 0)
    assert bench.lookup.present == {marker("n", 1)}


def test_a_store_that_says_nothing_of_the_epoch_says_nothing_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_with(0, 1)
    exist = bench.lookup.exist

    def silent(keys: Sequence[str]) -> list[Status]:
        return [
            Status.UNAVAILABLE if not parse_key(k).fingerprint else s for k, s in zip(keys, exist(keys), strict=True)
        ]

    monkeypatch.setattr(bench.lookup, "exist", silent)
    assert bench.scheduler.num_matched_tokens(bench.view(65), 0)[0] == 0


@pytest.mark.timeout(10)
def test_a_store_that_says_yes_to_everything_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    calls = 0

    def yes(keys: Sequence[str]) -> list[Status]:
        nonlocal calls
        calls += 1
        return [Status.OK] * len(keys)

    assert newest_epoch(yes, "n") == calls * MARKERS_PER_CALL
    monkeypatch.setattr(bench.lookup, "exist", yes)
    calls = 0
    assert bench.scheduler.num_matched_tokens(bench.view(65), 0) == (0, False)
    assert calls <= MAX_MOVES * (1 + MAX_CALLS)


def test_before_the_workers_have_announced_themselves_there_is_no_reset() -> None:
    bench = Bench()
    bench.scheduler._shards = None
    assert not bench.scheduler.reset()


@pytest.mark.parametrize(("begun", "newest"), [((), 0), ((1,), 1), ((1, 2, 5), 5), (tuple(range(1, 600)), 599)])
def test_the_newest_epoch_is_found_over_gaps(begun: tuple[int, ...], newest: int) -> None:
    there = {marker("n", epoch) for epoch in begun}
    asked: list[int] = []

    def exist(keys: Sequence[str]) -> list[Status]:
        asked.append(len(keys))
        return [Status.OK if key in there else Status.MISS for key in keys]

    assert newest_epoch(exist, "n") == newest
    assert set(asked) == {MARKERS_PER_CALL}


def test_a_marker_is_a_key_of_its_namespace() -> None:
    assert parse_key(marker("team a", 7)) == Key("team a", 7, name="reset")
    assert marker("team a", 7) == "kvpool1/team%20a/7/reset"


@pytest.fixture(params=["store", "socket"])
def lookup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Lookup, DictStore]]:
    store, outage = DictStore(), Outage(ManualClock(), 5)
    if request.param == "store":
        made: Lookup = StoreLookup(store, outage, 10)
        yield made, store
        made.close()
        return
    server = LookupServer(store, tmp_path / "lookup")
    made = SocketLookup(tmp_path / "lookup", outage, 10)
    yield made, store
    made.close()
    server.close()


def test_a_marker_is_written_through_either_way_of_asking(lookup: tuple[Lookup, DictStore]) -> None:
    asking, store = lookup
    key = marker("n", 1)
    assert asking.exist([key]) == [Status.MISS]
    assert asking.mark(key) is Status.OK
    assert asking.exist([key]) == [Status.OK]
    assert store.objects.keys() == {key}


def test_jobs_are_saved_and_loaded_under_their_own_epoch_and_the_descriptor_follows() -> None:
    with rig() as worker:
        worker.save({1: 1}, epoch=3)
        worker.drain()
        (key,) = [key for key in worker.store.objects if parse_key(key).block_hash]
        assert parse_key(key).epoch == 3
        described = {parse_key(key).epoch for key in worker.store.objects if not parse_key(key).block_hash}
        assert described == {0, 3}
