"""Routers are told of a block once all of it is in the pool, and of resets."""

from __future__ import annotations

from typing import Any

import pytest
from stores import DictStore
from test_scheduler import Bench
from test_worker import Rig

from kvpool_connector.contract.status import Status
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.epoch import marker
from kvpool_connector.events import BlockEvents, StoredBlock
from kvpool_connector.metadata import GroupBlocks, LoadReport, SaveJob, StepMetadata
from kvpool_connector.tracker import GroupRule, RequestView

TOKENS = list(range(100, 165))


def saving(tp: int = 1, heads: int = 1, **options: Any) -> tuple[Bench, BlockEvents, RequestView]:
    """A scheduler side that has handed out saves of four blocks."""
    events = BlockEvents()
    bench = Bench(tp=tp, heads=heads, events=events, **options)
    view = bench.view(65, token_ids=TOKENS, lora_name="adapter")
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]] * len(bench.rules), 0)
    assert bench.schedule(view, 0, 65, [[1, 2, 3, 4, 5]] * len(bench.rules), True)
    assert events.take() == []
    return bench, events, view


def stored(*keys: str) -> LoadReport:
    return LoadReport(stored=frozenset(keys))


def test_a_block_is_told_with_what_routers_need() -> None:
    bench, events, view = saving()
    bench.scheduler.report(stored(*bench.keys(view, 0, 0), *bench.keys(view, 0, 2)))
    hashes = view.block_hashes
    assert sorted(events.take(), key=lambda block: block.token_ids if block else ()) == [
        StoredBlock(0, hashes[0], None, tuple(range(100, 116)), 16, "adapter"),
        StoredBlock(0, hashes[2], hashes[1], tuple(range(132, 148)), 16, "adapter"),
    ]
    # Once, whatever is stored again.
    bench.scheduler.report(stored(*bench.keys(view, 0, 0)))
    assert events.take() == []


@pytest.mark.parametrize(("tp", "heads", "shards"), [(4, 4, 4), (4, 2, 2), (4, 1, 1)])
def test_split_and_replicated_heads_make_one_event_when_every_shard_is_in(tp: int, heads: int, shards: int) -> None:
    bench, events, view = saving(tp, heads)
    keys = bench.keys(view, 0, 1)
    assert len(keys) == shards
    for key in keys[:-1]:
        bench.scheduler.report(stored(key))
        assert events.take() == []
    bench.scheduler.report(stored(keys[-1]))
    assert [block.block_hash for block in events.take() if block] == [view.block_hashes[1]]


def test_groups_are_told_by_themselves() -> None:
    bench, events, view = saving(rules=(GroupRule(16), GroupRule(32)))
    bench.scheduler.report(stored(*bench.keys(view, 1, 1)))
    (block,) = events.take()
    assert block == StoredBlock(1, view.block_hashes[3], view.block_hashes[1], tuple(TOKENS[32:64]), 32, "adapter")


def test_what_was_there_whole_is_not_told_and_what_another_engine_stored_counts() -> None:
    bench, events, view = saving(2, 2)
    first, second = bench.keys(view, 0, 0), bench.keys(view, 0, 1)
    bench.scheduler.report(LoadReport(present=frozenset(first)))
    bench.scheduler.report(LoadReport(stored=frozenset(second[:1]), present=frozenset(second[1:])))
    assert [block.block_hash for block in events.take() if block] == [view.block_hashes[1]]


@pytest.mark.parametrize("own", [True, False])
def test_a_reset_is_told_and_nothing_of_before_comes_after_it(own: bool) -> None:
    bench, events, view = saving()
    old = [bench.keys(view, 0, index) for index in range(4)]
    bench.scheduler.report(stored(*old[0]))
    if own:
        assert bench.scheduler.reset()
    else:
        bench.lookup.present.add(marker("n", 1))
        bench.scheduler.num_matched_tokens(bench.view(65, "other"), 0)
    bench.scheduler.report(stored(*old[1]))
    assert events.take() == [None]
    assert events.take() == []
    # What is stored from now on is told.
    view = bench.view(65, "new", token_ids=TOKENS)
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 0)
    assert bench.schedule(view, 0, 65, [[1, 2, 3, 4, 5]], True)
    bench.scheduler.report(stored(*bench.keys(view, 0, 0)))
    assert len(events.take()) == 1


def test_following_without_a_reset_is_none() -> None:
    bench, events, _ = saving(loads=False)
    bench.clock.time += 10
    bench.scheduler.num_matched_tokens(bench.view(65, "other"), 0)
    assert events.take() == []


def test_saves_that_never_end_are_forgotten_oldest_first() -> None:
    events = BlockEvents(max_blocks=2)
    for name in ("a", "b", "c", "a"):
        events.expect([name, f"{name}2"], StoredBlock(0, name.encode(), None, (), 16, None))
    events.saved({"b", "b2", "c", "c2"}, ())
    assert [block.block_hash for block in events.take() if block] == [b"c"]
    events.saved({"a", "a2"}, ())
    assert [block.block_hash for block in events.take() if block] == [b"a"]
    assert not events._waiting
    assert not events._blocks_of
    for name in ("a", "b", "c"):
        events.expect([name], StoredBlock(0, name.encode(), None, (), 16, None))
        events.saved({name}, ())
    assert [block.block_hash for block in events.take() if block] == [b"b", b"c"]


@pytest.mark.parametrize("transfer", ["packed", "direct"])
def test_workers_report_what_the_store_took(transfer: str) -> None:
    store = DictStore()
    rig = Rig(store, Topology(1, 2), Rank(), transfer=transfer, reports_stored=True)
    hashes = [bytes([i]) * 4 for i in range(8)]
    step = StepMetadata((), (SaveJob("r", (GroupBlocks(0, tuple(range(1, 9)), tuple(hashes)),)),), frozenset())

    def run() -> LoadReport | None:
        rig.worker.begin_step(step)
        rig.worker.end_step(step)
        assert rig.worker.drain(30)
        return rig.worker.take_report()

    store.answers["put"] = lambda keys: [Status.NO_SPACE] * len(keys)
    assert run() is None
    del store.answers["put"]
    report = run()
    assert report is not None
    # This rank's share of what both hold.
    assert report.stored == {key for key in store.objects if not key.endswith("descriptor")} != set()
    assert report.present == frozenset()
    assert run() == LoadReport(present=report.stored)
    assert rig.worker.take_report() is None
    rig.worker.close()


def test_nothing_is_reported_where_nobody_asks() -> None:
    rig = Rig()
    step = StepMetadata((), (SaveJob("r", (GroupBlocks(0, (1,), (b"h",)),)),), frozenset())
    rig.worker.begin_step(step)
    rig.worker.end_step(step)
    assert rig.worker.drain(30)
    assert rig.worker.take_report() is None
    rig.worker.close()


def test_ranks_reports_add_up() -> None:
    one = LoadReport(frozenset("a"), frozenset(), frozenset("k"), frozenset("p"))
    other = LoadReport(frozenset(), frozenset("a"), frozenset("l"), frozenset("q"))
    assert one.merge(other) == LoadReport(frozenset(), frozenset("a"), frozenset("kl"), frozenset("pq"))
