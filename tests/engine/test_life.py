"""The life of requests at its most complicated, with a cache that is too small: every token stays right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.conftest import assert_same, loads, num_objects
from tests.engine.engine import Engine
from tests.engine.inside import STATES
from tests.engine.models import BLOCK_SIZE
from tests.engine.prompts import PROMPTS, poolable, unseen
from tests.engine.serving import Answer

Pooled = Callable[..., Engine]
Plain = Callable[[str], Engine]
Baseline = Callable[[str], list[Answer]]
ENGINES = [("gqa", False), ("gqa", True), ("two-groups", False)]
"""Kind, and whether it loads between steps; with two groups it always does."""
CROWD = [[(i * 11 + j * (i + 3)) % 250 for j in range(100 + 13 * (i % 7))] for i in range(64)]


@pytest.mark.parametrize(("kind", "between"), ENGINES)
@pytest.mark.parametrize("fault", ["lose_first", "lose_middle", "lose_last"])
def test_a9_lost_blocks_are_computed_instead(
    pooled: Pooled, baseline: Baseline, kind: str, between: bool, fault: str
) -> None:
    running = pooled(kind, between)
    assert running.perform("evicts_from_the_engines_cache")
    before = loads(running.counts())
    with running.fault(fault):
        assert_same(running.generate(PROMPTS), baseline(kind))
        after = loads(running.counts())
        assert sum(after.values()) - sum(before.values()) == num_objects(kind, BLOCK_SIZE[kind])
        assert after["load_blocks_miss"] > before.get("load_blocks_miss", 0)
        # What was computed on the way is right too: it now comes from the local cache.
        assert_same(running.generate(PROMPTS), baseline(kind))
    running.assert_at_rest()


@pytest.mark.parametrize(("kind", "between"), ENGINES)
def test_a6_a_crowd_in_a_small_cache(pooled: Pooled, plain: Plain, kind: str, between: bool) -> None:
    expected = plain(kind).generate(CROWD, max_tokens=32)
    running = pooled(kind, between)
    before = running.counts()
    # The first round loads too: what it saved before it had to give up a request's blocks.
    for _ in range(2):
        assert_same(running.generate(CROWD, max_tokens=32), expected)
        after = running.counts()
        assert after["preemptions"] > before.get("preemptions", 0)
        assert after["load_blocks_ok"] > before.get("load_blocks_ok", 0)
        before = after
        running.assert_at_rest()
        running.forget()


ABORTS = [
    (kind, between, state)
    for kind, between in ENGINES
    for state in STATES
    if (kind, between, state) != (*ENGINES[0], "loading")
]


@pytest.mark.parametrize(("kind", "between", "state"), ABORTS)
def test_aborts_in_every_state(
    pooled: Pooled, plain: Plain, baseline: Baseline, kind: str, between: bool, state: str
) -> None:
    index = ABORTS.index((kind, between, state))
    if state == "prefilling":
        victims = [[(j * j + 5 * j + index) % 250 for j in range(500)]]
    elif state == "loading":
        victims = PROMPTS[:2]
    else:
        victims = [[(j * (i + 2) + 9 * index) % 250 for j in range(90)] for i in range(4)]
    # Others share the victims' prompts, and need their blocks.
    others = [*victims, *([token + index for token in prompt] for prompt in CROWD[:12]), *victims]
    expected = plain(kind).generate(others, max_tokens=24)
    running = pooled(kind, between)
    answers = running.perform("abort", state, victims, others, 24)
    assert_same(answers, expected)
    running.assert_at_rest()
    running.forget()
    # Nothing wrong was saved on the way.
    assert_same(running.generate(others, max_tokens=24), expected)


SOURCES = ("tokens_engine", "tokens_pool", "tokens_computed")


def test_e1_e2_every_token_of_a_prompt_has_one_source(pooled: Pooled) -> None:
    running, prompts = pooled("gqa"), unseen("sources")
    total, whole = sum(map(len, prompts)), poolable(BLOCK_SIZE["gqa"])

    def counted() -> list[int]:
        before = running.counts()
        running.generate(prompts, max_tokens=1)
        after = running.counts()
        assert all(after[name] >= count for name, count in before.items())
        return [after.get(name, 0) - before.get(name, 0) for name in SOURCES]

    assert counted() == [0, 0, total]
    running.forget()
    assert counted() == [0, sum(whole), total - sum(whole)]
    assert counted() == [sum(whole), 0, total - sum(whole)]
    running.forget()
    with running.fault("lose_first"):
        failed = running.counts().get("tokens_failed", 0)
        # What a load was to bring and did not is told apart, and is not counted as computed too.
        assert counted() == [0, sum(whole), total - sum(whole)]
        assert running.counts()["tokens_failed"] - failed == sum(whole)
