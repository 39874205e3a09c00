"""vLLM's `reset_prefix_cache(reset_connector=True)` reaches the pool, on this engine and on others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.conftest import assert_same
from tests.engine.engine import Engine, engine
from tests.engine.models import BLOCK_SIZE
from tests.engine.prompts import PROMPTS, poolable
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

Spec = Callable[..., EngineSpec]
Baseline = Callable[[str], list[Answer]]
NONE = [0] * len(PROMPTS)


@pytest.mark.parametrize(("kind", "processes"), [("gqa", False), ("gqa", True), ("two-groups", False)])
def test_b10_after_a_reset_no_engine_hits_what_was_stored_before(
    spec: Spec, baseline: Baseline, kind: str, processes: bool
) -> None:
    namespace = f"reset-{kind}-{processes}"

    def assert_hits(one: Engine, hits: list[int]) -> None:
        answers = one.generate(PROMPTS)
        assert_same(answers, baseline(kind))
        assert [answer.num_cached_tokens for answer in answers] == hits
        one.forget()

    full = poolable(BLOCK_SIZE[kind])
    with engine(spec(kind, namespace, processes=processes)) as one, engine(spec(kind, namespace)) as other:
        assert_hits(other, NONE)
        assert_hits(other, full)
        assert_hits(one, full)
        one.reset()
        # Of an engine with processes nobody here can wait for the saves.
        assert_hits(other if processes else one, NONE)
        # What was computed after the reset is shared again.
        assert_hits(other, full)
        other.reset()
    with engine(spec(kind, namespace)) as later:
        assert_hits(later, NONE)
