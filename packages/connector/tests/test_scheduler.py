"""The scheduler side decides: hits, loads, saves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
from clocks import ManualClock

from kvpool_connector.contract.descriptor import ComponentContent, Descriptor, LayerContent, ModelIdentity
from kvpool_connector.contract.errors import ConfigError
from kvpool_connector.contract.shards import RankShards, ShardMap
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.topology import Topology
from kvpool_connector.history import History
from kvpool_connector.metadata import LoadReport, SaveJob
from kvpool_connector.scheduler import PoolScheduler, ScheduledRequest, _Unconfirmed
from kvpool_connector.tracker import GroupRule, RequestView

FULL = GroupRule(16)


class SetLookup:
    """Says what a set says, and remembers what was asked."""

    def __init__(self) -> None:
        self.present: set[str] = set()
        self.asked: list[list[str]] = []

    def exist(self, keys: Sequence[str]) -> list[Status]:
        self.asked.append(list(keys))
        return [Status.OK if key in self.present else Status.MISS for key in keys]

    def mark(self, key: str) -> Status:
        self.present.add(key)
        return Status.OK

    def close(self) -> None:
        """Nothing to give back."""


class Bench:
    """A scheduler side with its surroundings."""

    def __init__(self, rules: Sequence[GroupRule] = (FULL,), tp: int = 1, heads: int = 1, **options: Any) -> None:
        self.rules, self.lookup, self.clock = list(rules), SetLookup(), ManualClock()
        self.unit = min(rule.block_size for rule in rules)
        self.scheduler = PoolScheduler(rules, self.unit, self.lookup, clock=self.clock, **options)
        topology = Topology(heads, tp)
        announced = []
        for rank in topology.ranks():
            content = ComponentContent("kv", "int8", (16, topology.heads(rank).count), "NHD")
            descriptors = tuple(
                (
                    Descriptor(
                        ModelIdentity("m"),
                        group,
                        rule.block_size,
                        topology.heads(rank),
                        topology.context(rank),
                        (LayerContent(str(group), (content,)),),
                    ),
                )
                for group, rule in enumerate(rules)
            )
            announced.append(RankShards(rank, "n", 0, (topology.writer(rank),) * len(descriptors), descriptors))
        self.shards = ShardMap(topology, announced)
        self.scheduler.set_shards(self.shards)

    def view(self, num_tokens: int, request_id: str = "r", prompt: int | None = None, **more: object) -> RequestView:
        hashes = [hashlib.sha256(bytes([i])).digest() for i in range(num_tokens // self.unit)]
        return RequestView(request_id, num_tokens, prompt or num_tokens, hashes, **more)  # type: ignore[arg-type]

    def keys(self, view: RequestView, group: int, index: int) -> list[str]:
        end = (index + 1) * self.rules[group].block_size
        return self.shards.keys(group, [view.block_hashes[end // self.unit - 1]], view.tag)

    def store(self, view: RequestView, blocks: Sequence[int], group: int = 0) -> None:
        for index in blocks:
            self.lookup.present.update(self.keys(view, group, index))

    def schedule(
        self, view: RequestView, computed: int, tokens: int, blocks: Sequence[Sequence[int | None]] | None, new: bool
    ) -> tuple[SaveJob, ...]:
        return self.scheduler.build_step([ScheduledRequest(view.request_id, blocks, new, computed, tokens)]).saves


def saved(jobs: Sequence[SaveJob]) -> list[tuple[int, int]]:
    """(group, block id) of all that is to be saved."""
    return [(group.group, block_id) for job in jobs for group in job.blocks for block_id in group.block_ids]


@pytest.mark.parametrize(
    ("present", "local", "expected"),
    [([], 0, 0), ([0, 1, 2], 0, 48), ([0, 2, 3], 0, 16), ([1, 2], 0, 0), ([1, 2], 16, 32), ([0, 1, 2, 3], 32, 32)],
)
def test_a18_g1_a_hit_is_the_leading_run_beyond_the_local_hit(present: list[int], local: int, expected: int) -> None:
    bench = Bench()
    view = bench.view(70)
    bench.store(view, present)
    assert bench.scheduler.num_matched_tokens(view, local) == (expected, False)
    assert all(
        key not in asked for asked in bench.lookup.asked for i in range(local // 16) for key in bench.keys(view, 0, i)
    )


@pytest.mark.parametrize(("num_tokens", "expected"), [(64, 48), (65, 64), (63, 48), (16, 0), (15, 0), (1, 0)])
def test_d8_at_least_one_token_is_left_to_compute(num_tokens: int, expected: int) -> None:
    bench = Bench()
    view = bench.view(num_tokens)
    bench.store(view, range(len(view.block_hashes)))
    assert bench.scheduler.num_matched_tokens(view, 0)[0] == expected


def test_g1_nothing_is_asked_when_the_local_hit_covers_all() -> None:
    bench = Bench()
    assert bench.scheduler.num_matched_tokens(bench.view(64), 48) == (0, False)
    assert bench.lookup.asked == []


def test_b1_a_block_counts_only_when_every_shard_is_there() -> None:
    bench = Bench(tp=8, heads=4)
    view = bench.view(65)
    assert len(bench.keys(view, 0, 0)) == 4
    for missing in range(4):
        for shard in range(4):
            bench.lookup.present = {key for i in range(4) for key in bench.keys(view, 0, i)}
            bench.lookup.present.remove(bench.keys(view, 0, missing)[shard])
            bench.clock.time += 10
            assert bench.scheduler.num_matched_tokens(view, 0)[0] == 16 * missing


def test_d7_d24_asking_again_is_idempotent_and_asks_the_store_once() -> None:
    bench = Bench()
    view = bench.view(65)
    bench.store(view, [0, 1])
    assert {bench.scheduler.num_matched_tokens(view, 0) for _ in range(5)} == {(32, False)}
    assert len(bench.lookup.asked) == 1
    bench.clock.time += 2
    bench.lookup.present.clear()
    assert bench.scheduler.num_matched_tokens(view, 0) == (0, False)


def test_b3_requests_that_hashes_do_not_stand_for_are_left_alone() -> None:
    bench = Bench()
    view = bench.view(65, poolable=False)
    bench.store(view, range(4))
    assert bench.scheduler.num_matched_tokens(view, 0) == (0, False)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 0)
    assert bench.schedule(view, 0, 65, [[1, 2, 3, 4, 5]], True) == ()


def test_b3_adapters_and_salts_do_not_share() -> None:
    bench = Bench()
    bench.store(bench.view(65, tag="a" * 16), range(4))
    assert bench.scheduler.num_matched_tokens(bench.view(65, "s", tag="b" * 16), 0)[0] == 0
    assert bench.scheduler.num_matched_tokens(bench.view(65, "t"), 0)[0] == 0
    assert bench.scheduler.num_matched_tokens(bench.view(65, "u", tag="a" * 16), 0)[0] == 64


def test_a18_the_load_covers_exactly_the_blocks_between_local_and_pool_hit() -> None:
    bench = Bench()
    view = bench.view(70)
    bench.store(view, range(4))
    assert bench.scheduler.num_matched_tokens(view, 16)[0] == 48
    bench.scheduler.allocated(view, [[10, 11, 12, 13, 14]], 48)
    step = bench.scheduler.build_step([ScheduledRequest("r", [[10, 11, 12, 13, 14]], True, 64, 6)])
    ((blocks,),) = [job.blocks for job in step.loads]
    assert blocks.block_ids == (11, 12, 13)
    assert blocks.block_hashes == tuple(view.block_hashes[1:4])
    assert step.overwritten == {11, 12, 13, 14}
    assert bench.scheduler.build_step([]).loads == ()


def test_c19_chunked_prefill_saves_every_full_block_once() -> None:
    bench = Bench()
    view = bench.view(100)
    bench.scheduler.allocated(view, [[]], 0)
    jobs = list(bench.schedule(view, 0, 40, [[1, 2, 3]], True))
    jobs += bench.schedule(view, 40, 4, None, False)
    jobs += bench.schedule(view, 44, 20, [[4]], False)
    jobs += bench.schedule(view, 64, 36, [[5, 6, 7]], False)
    assert saved(jobs) == [(0, i) for i in range(1, 7)]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 47])
def test_a_partial_block_is_never_saved(num_tokens: int) -> None:
    bench = Bench(save_decode_cache=True)
    view = bench.view(num_tokens)
    bench.scheduler.allocated(view, [[]], 0)
    assert len(saved(bench.schedule(view, 0, num_tokens, [[1, 2, 3]], True))) == num_tokens // 16


def test_decode_is_saved_only_when_asked_for() -> None:
    for save_decode, expected in ((False, [(0, 1)]), (True, [(0, 1), (0, 2)])):
        bench = Bench(save_decode_cache=save_decode)
        view = bench.view(32, prompt=20)
        bench.scheduler.allocated(view, [[]], 0)
        jobs = [*bench.schedule(view, 0, 20, [[1, 2]], True), *bench.schedule(view, 20, 12, None, False)]
        assert saved(jobs) == expected


def test_c17_rejected_tokens_are_never_saved() -> None:
    bench = Bench(save_decode_cache=True)
    view = bench.view(30, prompt=16)
    bench.scheduler.allocated(view, [[]], 0)
    assert saved(bench.schedule(view, 0, 40, [[1, 2, 3]], True)) == [(0, 1)]


def test_a28_a27_nothing_is_saved_on_top_of_a_load_that_may_have_failed() -> None:
    bench = Bench()
    view = bench.view(70)
    bench.store(view, [0])
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 16)
    other = bench.view(40, "sharing")
    bench.scheduler.allocated(other, [[1, 8, 9]], 0)
    step = [
        ScheduledRequest("r", [[1, 2, 3, 4, 5]], True, 16, 54),
        ScheduledRequest("sharing", [[1, 8, 9]], True, 16, 24),
    ]
    assert bench.scheduler.build_step(step).saves == ()
    assert bench.schedule(view, 70, 1, None, False) == ()
    bench.scheduler.report(LoadReport(loaded=frozenset({"r"})))
    assert saved(bench.schedule(view, 71, 1, None, False)) == [(0, i) for i in (1, 2, 3, 4)]
    assert saved(bench.schedule(other, 40, 1, None, False)) == [(0, 1), (0, 8)]


def test_a_request_that_ends_in_the_step_of_its_load_is_still_saved() -> None:
    bench = Bench()
    view = bench.view(70)
    bench.store(view, [0])
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 16)
    assert bench.schedule(view, 16, 54, [[1, 2, 3, 4, 5]], True) == ()
    assert bench.scheduler.finished("r", 71, completed=True)
    (job,) = bench.scheduler.build_step([]).saves
    assert job.final
    assert saved([job]) == [(0, i) for i in (1, 2, 3, 4)]
    assert bench.scheduler.num_tracked == 0


@pytest.mark.parametrize(("num_tokens", "complete"), [(64, False), (65, True)])
def test_the_last_token_of_an_answer_is_not_taken_as_computed(num_tokens: int, complete: bool) -> None:
    """Its place may hold the KV of a guess that was rejected."""
    bench = Bench(save_decode_cache=True)
    view = bench.view(62, prompt=40)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 0)
    assert saved(bench.schedule(view, 0, 66, [[1, 2, 3, 4, 5]], True)) == [(0, 1), (0, 2), (0, 3)]
    cast(list[bytes], view.block_hashes).append(b"the hash of the fourth")
    assert bench.scheduler.finished("r", num_tokens, completed=True) == complete
    assert saved(bench.scheduler.build_step([]).saves) == ([(0, 4)] if complete else [])


def test_engines_without_reports_confirm_a_load_some_steps_later() -> None:
    bench = Bench(confirm_after_steps=2)
    view = bench.view(70)
    bench.store(view, [0])
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 16)
    assert bench.schedule(view, 16, 54, [[1, 2, 3, 4, 5]], True) == ()
    assert bench.schedule(view, 70, 1, None, False) == ()
    assert saved(bench.schedule(view, 71, 1, None, False)) == [(0, i) for i in (1, 2, 3, 4)]


def test_blocks_that_the_engine_knows_to_have_failed_fail_their_request() -> None:
    bench = Bench()
    view = bench.view(70)
    bench.store(view, [0])
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 16)
    bench.schedule(view, 16, 54, [[1, 2, 3, 4, 5]], True)
    bench.scheduler.blocks_failed({1})
    assert bench.scheduler.num_matched_tokens(view, 0) == (0, False)


@pytest.mark.parametrize("how", ["runs", "preempted", "aborted", "another was aborted"])
def test_what_did_not_load_is_taken_out_of_the_engines_cache(how: str) -> None:
    """And all that was computed on it, whatever has become of the request meanwhile."""
    bench, evicted = Bench(), set[int]()
    bench.scheduler.bind_cache(evicted.update)
    view = bench.view(70)
    bench.store(view, [0, 1])
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 32)
    bench.schedule(view, 32, 38, [[1, 2, 3, 4, 5]], True)
    expected = {1, 2, 3, 4, 5}
    if how == "preempted":
        bench.scheduler.allocated(view, [[9, 8, 7, 6, 11]], 0)
        bench.schedule(view, 0, 70, [[9, 8, 7, 6, 11]], True)
    elif how == "aborted":
        bench.scheduler.finished("r", 71, completed=False)
    elif how == "another was aborted":
        other = bench.view(50, "other")
        bench.scheduler.allocated(other, [[20, 1, 2, 21]], 0)
        bench.schedule(other, 48, 2, [[20, 1, 2, 21]], True)
        bench.scheduler.finished("other", 51, completed=False)
        expected |= {21}
    bench.scheduler.report(LoadReport(failed=frozenset({"r"})))
    assert evicted == expected
    bench.scheduler.report(LoadReport(failed=frozenset({"r"})))
    assert evicted == expected


def test_what_loaded_stays_in_the_engines_cache() -> None:
    bench, evicted = Bench(), set[int]()
    bench.scheduler.bind_cache(evicted.update)
    view = bench.view(70)
    bench.store(view, [0, 1])
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 32)
    bench.schedule(view, 32, 38, [[1, 2, 3, 4, 5]], True)
    bench.scheduler.report(LoadReport(loaded=frozenset({"r"})))
    assert evicted == set()


def test_a_failed_load_is_not_tried_again() -> None:
    bench = Bench()
    view = bench.view(70)
    bench.store(view, range(4))
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 64)
    bench.schedule(view, 64, 6, [[1, 2, 3, 4, 5]], True)
    bench.scheduler.report(LoadReport(failed=frozenset({"r"})))
    assert bench.scheduler.num_matched_tokens(view, 0) == (0, False)
    assert saved(bench.schedule(view, 0, 70, None, False)) == [(0, i) for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("completed", [True, False])
def test_f4_nothing_is_left_of_ended_requests(completed: bool) -> None:
    bench = Bench()
    view = bench.view(70)
    bench.store(view, range(4))
    for i in range(100_000):
        view = replace(view, request_id=f"r{i}")
        bench.lookup.asked.clear()
        bench.scheduler.num_matched_tokens(view, 0)
        if i % 3:
            bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 64)
        if i % 3 == 2:
            bench.schedule(view, 64, 6, [[1, 2, 3, 4, 5]], True)
        bench.scheduler.finished(view.request_id, 71, completed=completed)
        bench.scheduler.build_step([])
        bench.scheduler.report(LoadReport(loaded=frozenset({view.request_id})))
    assert bench.scheduler.num_tracked == 0


def test_consumers_and_producers() -> None:
    deaf = Bench(loads=False)
    view = deaf.view(65)
    deaf.store(view, range(4))
    assert deaf.scheduler.num_matched_tokens(view, 0) == (0, False)
    mute = Bench(saves=False)
    mute.scheduler.allocated(view, [[]], 0)
    assert mute.schedule(view, 0, 65, [[1, 2, 3, 4, 5]], True) == ()


def test_without_a_handshake_everything_is_a_miss() -> None:
    bench = Bench()
    scheduler = PoolScheduler([FULL], 16, bench.lookup)
    assert not scheduler.ready
    assert scheduler.num_matched_tokens(bench.view(65), 0) == (0, False)


class TestSeveralGroups:
    """Full attention with blocks of 32 beside a window of 40 tokens with blocks of 16."""

    def bench(self) -> Bench:
        return Bench([GroupRule(32), GroupRule(16, window=39)])

    def test_the_hit_is_the_minimum_by_each_groups_rule(self) -> None:
        bench = self.bench()
        view = bench.view(130)
        bench.store(view, range(4), group=0)
        assert bench.scheduler.num_matched_tokens(view, 0) == (0, False)
        for boundary, needed in ((128, (5, 6, 7)), (96, (3, 4, 5)), (32, (0, 1))):
            bench.clock.time += 10
            bench.lookup.present = {key for i in range(4) for key in bench.keys(view, 0, i)}
            bench.store(view, needed, group=1)
            assert bench.scheduler.num_matched_tokens(view, 0) == (boundary, True)

    def test_a_window_one_block_short_is_no_hit(self) -> None:
        bench = self.bench()
        view = bench.view(130)
        bench.store(view, range(4), group=0)
        bench.store(view, (6, 7), group=1)
        assert bench.scheduler.num_matched_tokens(view, 0) == (0, False)

    def test_a20_a_longer_stored_key_implies_no_shorter_boundary(self) -> None:
        bench = self.bench()
        view = bench.view(130)
        bench.store(view, [3], group=0)
        bench.store(view, range(8), group=1)
        assert bench.scheduler.num_matched_tokens(view, 0) == (0, False)

    def test_loads_skip_blocks_outside_the_window_and_run_between_steps(self) -> None:
        bench = self.bench()
        view = bench.view(130)
        bench.store(view, range(4), group=0)
        bench.store(view, range(8), group=1)
        assert bench.scheduler.num_matched_tokens(view, 0) == (128, True)
        window: list[int | None] = [None] * 5 + [25, 26, 27]
        bench.scheduler.allocated(view, [[10, 11, 12, 13], window], 128)
        (job,) = bench.scheduler.build_step([]).loads
        assert job.between_steps
        assert [group.block_ids for group in job.blocks] == [(10, 11, 12, 13), (25, 26, 27)]
        assert job.blocks[0].block_hashes == tuple(view.block_hashes[i] for i in (1, 3, 5, 7))
        assert job.blocks[1].block_hashes == tuple(view.block_hashes[5:8])

    def test_a7_blocks_of_a_window_are_saved_in_the_step_that_completes_them_or_never(self) -> None:
        bench = self.bench()
        view = bench.view(130)
        bench.scheduler.allocated(view, [[], []], 0)
        assert saved(bench.schedule(view, 0, 40, [[1, 2], [11, 12, 13]], True)) == [(0, 1), (1, 11), (1, 12)]
        bench.scheduler._unconfirmed["somebody"] = _Unconfirmed(frozenset({1}), 0)
        assert bench.schedule(view, 40, 40, [[3], [14, 15]], False) == ()
        bench.scheduler._unconfirmed.clear()
        assert saved(bench.schedule(view, 80, 20, [[4], [16, 17]], False)) == [(0, 2), (0, 3), (1, 16)]


class TestStates:
    """Full attention beside a group whose blocks of 16 tokens hold states."""

    def bench(self, prompts_only: bool = False) -> Bench:
        rules = [GroupRule(16), GroupRule(16, 1, state=True, prompts_only=prompts_only)]
        return Bench(rules, save_decode_cache=True)

    def test_a_hit_needs_the_state_at_its_end_and_all_tokens(self) -> None:
        bench = self.bench()
        view = bench.view(100)
        bench.store(view, range(6), group=0)
        bench.store(view, [1, 3], group=1)
        assert bench.scheduler.num_matched_tokens(view, 0) == (64, True)
        bench.scheduler.allocated(view, [[1, 2, 3, 4], [None, None, None, 9]], 64)
        (job,) = bench.scheduler.build_step([]).loads
        assert [group.block_ids for group in job.blocks] == [(1, 2, 3, 4), (9,)]

    def test_a_part_of_a_block_that_the_engine_has_is_left_to_it(self) -> None:
        bench = self.bench()
        view = bench.view(100)
        for group in (0, 1):
            bench.store(view, range(6), group=group)
        assert bench.scheduler.num_matched_tokens(view, 24) == (0, False)
        assert bench.scheduler.num_matched_tokens(view, 32) == (64, True)

    @pytest.mark.parametrize(("end", "states"), [(48, [(1, 12)]), (47, []), (50, [])])
    def test_a_state_is_saved_only_where_the_step_ends_with_its_block(
        self, end: int, states: list[tuple[int, int]]
    ) -> None:
        bench = self.bench()
        view = bench.view(100)
        bench.scheduler.allocated(view, [[], []], 0)
        bench.schedule(view, 0, 16, [[1], [11]], True)
        # The block of before is still in the table, with the state of before.
        jobs = bench.schedule(view, 16, end - 16, [[2, 3, 4], [None, 12, 13]], False)
        assert [pair for pair in saved(jobs) if pair[0] == 1] == states

    @pytest.mark.parametrize(("prompts_only", "expected"), [(False, [(1, 12)]), (True, [])])
    def test_c17_after_a_step_that_may_guess_a_state_is_not_taken_for_its_blocks(
        self, prompts_only: bool, expected: list[tuple[int, int]]
    ) -> None:
        bench = self.bench(prompts_only)
        view = bench.view(32, prompt=20)
        bench.scheduler.allocated(view, [[], []], 0)
        assert [pair for pair in saved(bench.schedule(view, 0, 16, [[1], [11]], True)) if pair[0]] == [(1, 11)]
        jobs = bench.schedule(view, 16, 16, [[2], [12]], False)
        assert [pair for pair in saved(jobs) if pair[0] == 1] == expected


TOKEN_SOURCES = ("tokens_engine", "tokens_pool", "tokens_computed")


@pytest.mark.parametrize("between_steps", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_e1_e2_sources_sum_to_the_tokens_of_every_take_up(seed: int, between_steps: bool) -> None:
    """Whatever a request meets: looked up again while it waits, preempted, hit on resume, its load failed."""
    random = Random(seed)
    bench = Bench(load_between_steps=between_steps)
    expected = failed = 0
    for i in range(30):
        view = bench.view(random.randrange(1, 120), f"r{i}")
        table = list(range(1, len(view.block_hashes) + 2))
        for _ in range(random.randrange(1, 4)):
            bench.lookup.present.clear()
            bench.store(view, [b for b in range(len(view.block_hashes)) if random.random() < 0.8])
            local = random.randrange(0, view.num_tokens) // 16 * 16
            for _ in range(random.randrange(1, 5)):
                found, _ = bench.scheduler.num_matched_tokens(view, local)
                bench.clock.time += random.choice((0.0, 2.0))
            tracker = bench.scheduler._trackers.get(view.request_id)
            asked = tracker is None or not tracker.load_failed
            before = bench.scheduler.counters.totals()
            bench.scheduler.allocated(view, [table], found)
            bench.scheduler.allocated(view, [table], 0)
            after = bench.scheduler.counters.totals()
            grown = {source: after.get(source, 0) - before.get(source, 0) for source in TOKEN_SOURCES}
            assert all(count >= 0 for count in grown.values())
            assert grown["tokens_pool"] == found
            assert sum(grown.values()) == (view.num_tokens if asked else 0)
            expected += sum(grown.values())
            bench.schedule(view, local + found, view.num_tokens - local - found, [table], True)
            outcome = frozenset({view.request_id})
            if found and random.random() < 0.4:
                failed += found
                bench.scheduler.report(LoadReport(failed=outcome))
                bench.scheduler.blocks_failed(set(table))
                bench.scheduler.report(LoadReport(failed=outcome))
            else:
                bench.scheduler.report(LoadReport(loaded=outcome))
        bench.scheduler.finished(view.request_id, view.num_tokens, completed=True)
    counts = bench.scheduler.counters.totals()
    assert sum(counts.get(source, 0) for source in TOKEN_SOURCES) == expected
    assert counts.get("tokens_failed", 0) == failed
    assert failed <= counts["tokens_pool"]
    assert min(counts.values()) >= 0


def test_d4_nothing_is_said_or_saved_for_requests_of_another() -> None:
    """As a child of MultiConnector that was not chosen: asked, then told that nothing of it is taken."""
    bench = Bench(load_between_steps=True)
    evicted: list[set[int]] = []
    bench.scheduler.bind_cache(evicted.append)
    view = bench.view(70)
    bench.store(view, range(4))
    assert bench.scheduler.num_matched_tokens(view, 0) == (64, True)
    bench.scheduler.allocated(view, [[]], 0)
    assert bench.scheduler.build_step([]).loads == ()
    # What the other loads, well or not, is no load of ours.
    bench.scheduler.report(LoadReport(loaded=frozenset({"r"})))
    bench.scheduler.blocks_failed({1, 2, 3, 4})
    assert evicted == []
    assert saved(bench.schedule(view, 64, 6, [[1, 2, 3, 4, 5]], True)) == [(0, i) for i in (1, 2, 3, 4)]
    # One that this scheduler side was never told of at all.
    stranger = ScheduledRequest("stranger", [[6, 7]], True, 0, 32)
    step = bench.scheduler.build_step([stranger])
    assert (step.loads, step.saves, step.overwritten) == ((), (), frozenset())
    assert bench.scheduler.finished("stranger", 33, completed=True) is False
    assert bench.scheduler.build_step([]).saves == ()


class CountedHashes(Sequence[bytes]):
    """Block hashes that count how often one is taken."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.taken = 0

    def __len__(self) -> int:
        return self.num_blocks

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.num_blocks))]
        self.taken += 1
        return hashlib.sha256(b"%d" % index).digest()


@pytest.mark.parametrize("rules", [[FULL], [GroupRule(32), GroupRule(16, window=39)]], ids=["one group", "two"])
def test_g2_work_is_linear_in_the_prompt_however_it_is_cut(rules: list[GroupRule]) -> None:
    def work(num_blocks: int, chunk: int) -> tuple[int, int]:
        bench = Bench(rules)
        hashes = CountedHashes(num_blocks)
        view = RequestView("r", num_blocks * 16 + 1, num_blocks * 16 + 1, hashes)
        bench.scheduler.num_matched_tokens(view, 0)
        bench.scheduler.allocated(view, [[] for _ in rules], 0)
        done = 0
        for start in range(0, num_blocks, chunk):
            tables = [
                list(range(start * 16 // rule.block_size + 1, (start + chunk) * 16 // rule.block_size + 1))
                for rule in rules
            ]
            done += len(saved(bench.schedule(view, start * 16, chunk * 16, tables, start == 0)))
        assert done == sum(num_blocks * 16 // rule.block_size for rule in rules)
        return hashes.taken, sum(len(keys) for keys in bench.lookup.asked)

    few, many = work(256, 2), work(1024, 2)
    assert many[0] == 4 * few[0]
    assert many[1] <= 4 * few[1]
    assert work(1024, 2) == work(1024, 64), "smaller chunks are no more work"


def test_e2_lookups_and_tokens_are_counted_once_by_outcome_and_source(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    view = bench.view(70)
    bench.store(view, [1, 2])
    assert bench.scheduler.num_matched_tokens(view, 16) == (32, False)
    assert bench.scheduler.num_matched_tokens(view, 16) == (32, False)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 32)
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 0)
    bench.scheduler.num_matched_tokens(bench.view(15, "short"), 0)
    bench.scheduler.num_matched_tokens(bench.view(17, "miss"), 0)
    monkeypatch.setattr(bench.lookup, "exist", lambda keys: [Status.TIMEOUT] * len(keys))
    bench.scheduler.num_matched_tokens(bench.view(17, "down"), 0)
    counts = bench.scheduler.counters.totals()
    assert {name: counts.get(f"lookups_{name}") for name in ("hit", "short", "miss", "unanswered")} == {
        "hit": 1,
        "short": 1,
        "miss": 1,
        "unanswered": 1,
    }
    assert {name: counts.get(f"tokens_{name}") for name in ("engine", "pool", "computed")} == {
        "engine": 16,
        "pool": 32,
        "computed": 22,
    }


@pytest.mark.parametrize(("least", "expected"), [(0, 32), (32, 32), (33, 0)])
def test_g4_a_hit_of_fewer_tokens_than_the_number_is_computed(least: int, expected: int) -> None:
    bench = Bench(min_tokens_to_load=least)
    view = bench.view(70)
    bench.store(view, [0, 1])
    assert bench.scheduler.num_matched_tokens(view, 0)[0] == expected
    assert bench.scheduler.counters.totals()["lookups_hit" if expected else "lookups_below"] == 1


def test_g4_what_the_engine_has_itself_does_not_count() -> None:
    bench = Bench(min_tokens_to_load=33)
    view = bench.view(70)
    bench.store(view, range(4))
    assert bench.scheduler.num_matched_tokens(view, 16)[0] == 48
    assert bench.scheduler.num_matched_tokens(view, 32)[0] == 0


def test_g4_a_prompt_shorter_than_the_number_is_not_looked_up_but_follows_resets() -> None:
    bench = Bench(min_tokens_to_load=65)
    view = bench.view(65)
    bench.store(view, range(4))
    assert bench.scheduler.num_matched_tokens(view, 0)[0] == 0
    assert not {key for asked in bench.lookup.asked for key in asked} & bench.lookup.present
    other = Bench()
    other.scheduler.reset()
    bench.lookup.present |= other.lookup.present
    bench.clock.time += 2
    bench.scheduler.num_matched_tokens(view, 0)
    assert bench.scheduler.epoch == 1


def test_g4_the_number_is_learnt_from_what_workers_and_clock_say() -> None:
    """Loads take a second, steps a millisecond a token."""
    history = History(100)
    bench = Bench(min_tokens_to_load="auto", history=history)
    found = []
    for number in range(40):
        name = f"r{number}"
        view = bench.view(65, name)
        bench.store(view, range(4))
        hit, _ = bench.scheduler.num_matched_tokens(view, 0)
        found.append(hit)
        bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], hit)
        for computed, tokens in ((hit, 65 - hit), (65, 1)):
            step = bench.scheduler.build_step([ScheduledRequest(name, [[1, 2, 3, 4, 5]], True, computed, tokens)])
            bench.clock.time += 1e-3 * tokens
            loaded = frozenset(job.request_id for job in step.loads)
            bench.clock.time += len(loaded)
            seconds = dict.fromkeys(loaded, 1.0)
            bench.scheduler.report(LoadReport(loaded, seconds=seconds, step=step.number))
        assert not bench.scheduler.finished(name, 66, completed=False)
    # Three loads tell of loading, four hits are computed to learn of computing, and then it is known.
    assert found == [64] * 3 + [0] * 37
    assert not bench.scheduler._load_tokens
    (last,) = history.find("r39")
    assert (last.result, last.least_tokens) == ("below", 8193)


def test_without_auto_no_step_is_numbered() -> None:
    bench = Bench()
    assert bench.scheduler.build_step([]).number == 0


def take_up(bench: Bench, name: str, local: int) -> list[tuple[int, int]]:
    """A request of 65 tokens of which the engine has `local`; what it hands over to saves."""
    view = bench.view(65, name)
    hit, _ = bench.scheduler.num_matched_tokens(view, local)
    assert not hit
    bench.scheduler.allocated(view, [[1, 2, 3, 4, 5]], 0)
    jobs = bench.schedule(view, local, 65 - local, [[1, 2, 3, 4, 5]], True)
    bench.scheduler.finished(name, 66, completed=True)
    return saved(jobs)


def test_what_the_engine_has_itself_is_neither_looked_up_nor_saved_again_for_a_while() -> None:
    bench = Bench()
    assert take_up(bench, "first", 0) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    asked = len(bench.lookup.asked)
    for number in range(3):
        bench.clock.time += 9
        assert take_up(bench, f"again{number}", 64) == []
    assert len(bench.lookup.asked) == asked
    # A save may have failed, or the store may have lost what it had.
    bench.clock.time += 9
    assert take_up(bench, "late", 64) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_a_last_block_that_is_computed_again_is_not_saved_again() -> None:
    bench = Bench()
    view = bench.view(64, "first")
    for name, local in (("first", 0), ("again", 48)):
        bench.scheduler.num_matched_tokens(replace(view, request_id=name), local)
        bench.scheduler.allocated(replace(view, request_id=name), [[1, 2, 3, 4]], 0)
        step = bench.scheduler.build_step([ScheduledRequest(name, [[1, 2, 3, 4]], True, local, 64 - local)])
        assert saved(step.saves) == ([] if local else [(0, 1), (0, 2), (0, 3), (0, 4)])


def test_blocks_that_nobody_handed_over_are_though_the_engine_has_them() -> None:
    bench = Bench()
    assert take_up(bench, "other's", 32) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_after_a_failed_load_all_is_handed_over_though_it_was_lately() -> None:
    bench = Bench()
    take_up(bench, "first", 0)
    view = bench.view(65, "second")
    bench.store(view, range(4))
    hit, _ = bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[6, 7, 8, 9, 10]], hit)
    assert bench.schedule(view, hit, 65 - hit, [[6, 7, 8, 9, 10]], True) == ()
    bench.scheduler.report(LoadReport(failed=frozenset({"second"})))
    assert saved(bench.schedule(view, 0, 65, None, False)) == [(0, 6), (0, 7), (0, 8), (0, 9)]


def test_what_was_handed_over_before_a_reset_is_not_passed_over_after_it() -> None:
    bench = Bench()
    take_up(bench, "first", 0)
    assert bench.scheduler.reset()
    assert take_up(bench, "again", 64) == [(0, 1), (0, 2), (0, 3), (0, 4)]


def test_what_is_remembered_of_saves_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_connector.recent_saves.MAX_REMEMBERED", 6)
    bench = Bench()
    take_up(bench, "first", 0)
    assert len(bench.scheduler._recent) <= 6 + 4
    bench.clock.time += 31
    take_up(bench, "second", 0)
    assert len(bench.scheduler._recent) == 4


def test_blocks_of_a_group_that_do_not_divide_into_hashed_ones_are_refused() -> None:
    """Their keys would be those of other tokens."""
    PoolScheduler([GroupRule(48), GroupRule(16)], 16, SetLookup())
    for block_size in (24, 8):
        with pytest.raises(ConfigError) as error:
            PoolScheduler([GroupRule(16), GroupRule(block_size)], 16, SetLookup())
        assert str(error.value) == (
            f"KV cache group 1: its blocks do not divide into hashed ones: found blocks of {block_size} tokens (of all "
            "context-parallel ranks), and a block hash for each 16; expected a multiple. Start with a --block-size "
            "that divides the blocks of every group, or serve this model without the pool"
        )
