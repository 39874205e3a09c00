"""Short hits are computed where loading them is slower: as a number, and learnt."""

from __future__ import annotations

from collections.abc import Callable

from tests.engine.conftest import assert_same, loads
from tests.engine.engine import Engine, engine
from tests.engine.prompts import PROMPTS, poolable, unseen
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

LEAST = 129
SLOW_S = 3.0
"""Of a read: what no prompt of a tiny model takes to compute."""
PROMPT = unseen("g4")[1]


def test_g4_hits_of_fewer_tokens_than_the_number_are_computed(
    filled: Callable[[str], EngineSpec], spec: Callable[..., EngineSpec], baseline: Callable[[str], list[Answer]]
) -> None:
    filled("gqa")
    with engine(spec("gqa", extra={"min_tokens_to_load": LEAST})) as one:
        answers = one.generate(PROMPTS)
        assert_same(answers, baseline("gqa"))
        wanted = [hit if hit >= LEAST else 0 for hit in poolable(one.spec.block_size)]
        assert 0 in wanted
        assert max(wanted) >= LEAST
        assert [answer.num_cached_tokens for answer in answers] == wanted


def test_g4_an_engine_learns_that_computing_is_faster(
    spec: Callable[..., EngineSpec], plain: Callable[[str], Engine], baseline: Callable[[str], list[Answer]]
) -> None:
    expected = plain("gqa").generate([PROMPT])
    with engine(spec("gqa", "g4", {"min_tokens_to_load": "auto"})) as one, one.fault("slow_reads", SLOW_S):
        hits = []
        for _ in range(12):
            answers = one.generate([PROMPT])
            assert_same(answers, expected)
            hits.append(answers[0].num_cached_tokens)
            one.forget()
        # The first finds nothing; until both ways are measured some are loaded, and then none, so that trials are rare.
        full = (len(PROMPT) - 1) // one.spec.block_size * one.spec.block_size
        assert hits[0] == 0
        assert hits[1] == full
        assert hits[-4:] == [0] * 4, hits
        assert loads(one.counts())["load_blocks_ok"] * one.spec.block_size == sum(hits)


def test_g4_the_check_can_fail(spec: Callable[..., EngineSpec]) -> None:
    """Planted: an engine that loads whatever it costs is told from one that learns."""
    with engine(spec("gqa", "g4-always", {"min_tokens_to_load": 0})) as one, one.fault("slow_reads", 0.1):
        hits = []
        for _ in range(4):
            hits.append(one.generate([PROMPT])[0].num_cached_tokens)
            one.forget()
        assert hits[-1] > 0
