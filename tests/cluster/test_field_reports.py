"""Faults from the field, each made on purpose in the cluster: nothing is wrong, everything ends."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvpool_simulator.engine import Limits, Mix, Order, Timing
from tests.cluster.cluster import Outcome, run
from tests.cluster.field_reports import FAULTS, PAGE, held_rows, holders
from tests.cluster.scenario import HYBRID, Scenario, Shape


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults make the connector speak."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def cluster(seed: int = 0, **changes: Any) -> Outcome:
    """A run of two engines over one pool with few blocks, which must be right and end."""
    base = Scenario(
        seed,
        "lite",
        limits=Limits(40, max_batched_tokens=256, max_requests=8),
        num_engines=2,
        num_requests=40,
        settings={"load_async": bool(seed % 2), "load_timeout_s": 1.0, "outage_pause_s": 0.01},
    )
    outcome = run(replace(base, **changes))
    assert outcome.violations == []
    return outcome


def test_a6_blocks_are_recycled_at_every_step() -> None:
    limits = Limits(44, max_batched_tokens=512, max_requests=64, asynchronous=True)
    outcome = cluster(limits=limits, num_requests=120, arrival_s=0.0)
    assert outcome.num_loads > 300


@pytest.mark.parametrize("site", ["code", "short_list", "none", "raise", "short_read"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a9_a27_c11_whatever_a_read_answers_no_wrong_block_is_used(site: str, seed: int) -> None:
    outcome = cluster(seed, rates={site: 0.1}, shape=Shape(tp=2))
    assert outcome.faults[site] > 5
    assert outcome.num_loads > 10


@pytest.mark.parametrize("seed", [0, 1])
def test_a14_c9_what_the_store_only_says_to_have_stored_is_a_miss(seed: int) -> None:
    outcome = cluster(seed, rates={"lie": 0.3})
    assert outcome.faults["lie"] > 5


@pytest.mark.parametrize("seed", [0, 1])
def test_a35_late_answers_reach_nobody_elses_block(seed: int) -> None:
    settings = {"load_async": bool(seed), "load_timeout_s": 0.02, "outage_pause_s": 0.01}
    assert cluster(seed, rates={"late": 0.1}, settings=settings).faults["late"] >= 3


def test_a25_loads_come_behind_what_is_in_flight() -> None:
    limits = Limits(36, max_batched_tokens=256, asynchronous=True, order=Order.V0_23)
    assert cluster(limits=limits, num_requests=80, timing=Timing(layer_s=0.01)).num_loads > 50


def test_b8_d21_heads_that_several_ranks_hold_are_stored_once_and_loaded_by_all() -> None:
    outcome = cluster(shape=Shape("tiny-qwen3-32b", tp=4))
    assert outcome.num_loads > 50
    assert outcome.counters["save_blocks_stored"] <= outcome.num_audited / 2


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("shape", [Shape(tp=2), Shape(HYBRID, block_sizes=(16, 32), window=24)])
def test_b10_new_weights_never_meet_what_the_old_ones_left(seed: int, shape: Shape) -> None:
    limits = Limits(60, max_batched_tokens=256, max_requests=8, asynchronous=True)
    outcome = cluster(seed, shape=shape, limits=limits, num_engines=1, num_requests=120, events=("reset",) * 4)
    assert outcome.num_resets == 4
    assert outcome.num_loads > 50


def test_c2_ends_are_told_once_with_guessed_tokens() -> None:
    limits = Limits(40, max_requests=8, num_draft_tokens=3, asynchronous=True)
    cluster(limits=limits, mix=Mix(longest_answer=40, pooling=0.1, aborts=0.2))


def test_c3_every_stage_saves_with_mtp() -> None:
    outcome = cluster(shape=Shape(pp=2, options={"mtp": True}), mix=Mix(adapters=0.3))
    assert outcome.num_loads > 50


MANY_DOCUMENTS = Mix(num_documents=8)
"""More than an engine's own cache holds."""
PIPELINES: dict[int, tuple[tuple[int, ...], ...]] = {1: ((6,),), 2: ((4, 2), (1, 5)), 4: ((2, 1, 1, 2), (1, 1, 3, 1))}
"""Uneven stages of six layers, by the number of stages; MTP is in the last."""


def common_cuts(*pipelines: Sequence[int]) -> tuple[int, ...]:
    """Sizes that end wherever a stage of one of the pipelines ends."""
    ends = sorted({sum(sizes[: i + 1]) for sizes in pipelines for i in range(len(sizes))})
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


@pytest.mark.parametrize("consumer", [1, 2, 4])
@pytest.mark.parametrize("producer", [1, 2, 4])
def test_c3_pipelines_of_other_sizes_share_the_pool(producer: int, consumer: int) -> None:
    """Only the producer saves, only the consumer loads, and it computes on every byte that it loads."""
    writes, reads = PIPELINES[producer][0], PIPELINES[consumer][-1]
    cuts = common_cuts(writes, reads)
    options = {"mtp": True, "sparse": "split"}
    both = [Shape("tiny-glm-5.2", 1, len(s), options=options, stages=s, cuts=cuts) for s in (writes, reads)]
    settings = {"load_async": producer == 2, "use_layerwise": consumer == 2, "load_timeout_s": 1.0}
    outcome = cluster(producer, shape=both[0], consumer=both[1], settings=settings, mix=MANY_DOCUMENTS, num_requests=60)
    assert outcome.num_loads > 50


def test_c3_pipelines_cut_otherwise_share_nothing() -> None:
    """The check above can fail: without a common cut a stage's object is not another's."""
    shapes = [Shape("tiny-glm-5.2", pp=len(stages), stages=stages) for stages in ((4, 2), (2, 4))]
    assert cluster(shape=shapes[0], consumer=shapes[1], mix=MANY_DOCUMENTS, num_requests=60).num_loads == 0


def test_c7_c10_a_full_store_is_served_round() -> None:
    outcome = cluster(spare_objects=20, lease_ms=60_000)
    assert outcome.num_missing > 20
    assert outcome.num_loads > 20


def test_c12_objects_that_go_between_lookup_and_load_fail_nobody() -> None:
    assert cluster(rates={"evict": 0.5}).faults["evict"] > 5


@pytest.mark.parametrize("block_sizes", [(16, 32), (32, 16)])
def test_a20_groups_of_other_block_sizes_and_windows(block_sizes: tuple[int, ...]) -> None:
    outcome = cluster(shape=Shape(HYBRID, block_sizes=block_sizes, window=24), limits=Limits(70, 256), num_requests=80)
    assert outcome.num_loads > 20


def test_c17_c21_chats_go_on_from_saved_answers() -> None:
    mix = Mix(chats=0.9, longest_answer=40, longest_question=20)
    assert cluster(mix=mix, settings={"save_decode_cache": True}).num_loads > 10


@pytest.mark.parametrize("chunk", [24, 100])
def test_c19_long_prompts_in_chunks_are_stored_whole(chunk: int) -> None:
    outcome = cluster(limits=Limits(400, max_batched_tokens=64, max_chunk=chunk), num_engines=1, mix=Mix(chats=0.0))
    assert outcome.num_missing == 0


@pytest.mark.parametrize("seed", [1, 3])
def test_d1_f4_aborts_during_loads_leave_nothing(seed: int) -> None:
    outcome = cluster(seed, mix=Mix(aborts=0.8), num_requests=150, latency_s=0.02)
    assert outcome.num_loads > 5


@pytest.mark.parametrize("event", ["kill", "hang", "restart", "owner"])
def test_d15_serving_goes_on_while_the_store_is_in_trouble(event: str) -> None:
    outcome = cluster(3, events=(event,), num_requests=60)
    assert outcome.faults[event] == 1


def test_d3_d23_no_hook_waits_longer_than_its_limit() -> None:
    """Saves are never waited for; loads that a step computes on end with their own limit."""
    settings = {"load_timeout_s": 0.5, "fence_timeout_s": 0.02, "outage_pause_s": 0.01, "transfer": "packed"}
    outcome = cluster(rates={"late": 0.1, "never": 0.02}, settings=settings, shape=Shape(tp=2))
    assert outcome.longest_hook_s["wait_for_save"] == 0.0
    assert outcome.longest_hook_s["handle_preemptions"] <= 0.05
    assert outcome.longest_hook_s["start_load_kv"] <= 0.6


def test_the_page_tells_of_every_fault_and_of_tests_that_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    known = holders()
    rows = {
        line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if re.match(r"\| [A-H]\d", line)
    }
    assert rows.keys() == FAULTS.keys()
    for fault, line in rows.items():
        assert FAULTS[fault] in line
        told = set(re.findall(r"`([^`]+)`", line))
        gone = told - {test.split("/")[-1] for test in known[fault]}
        assert not gone, f"{fault}: {gone} are no more; run `python -m tests.cluster.field_reports`"


def test_a_test_holds_what_its_name_carries() -> None:
    assert "test_field_reports.py::test_a9_a27_c11_whatever_a_read_answers_no_wrong_block_is_used" in {
        test.split("/")[-1] for test in holders()["C11"]
    }
    assert held_rows()[1] == len(FAULTS) == 68
