"""What the engine has in its own cache costs no call to the store.

MLA is left out: on a CPU vLLM (0.32.0) has no prefix cache of its own for it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.engine import engine
from tests.engine.prompts import PROMPTS, poolable, unseen
from tests.engine.spec import EngineSpec


@pytest.mark.parametrize("kind", ["gqa", "two-groups"])
def test_a_prompt_that_the_engine_has_itself_costs_no_call_to_the_store(
    spec: Callable[..., EngineSpec], kind: str
) -> None:
    with engine(spec(kind, f"local-{kind}", patches=("tests.engine.faults:remember_saves",))) as one:
        prompts = unseen("local")
        one.generate(prompts)
        one.perform("drain")
        with one.fault("count_calls"):
            assert one.perform("tests.engine.faults:num_calls") == 0
            for _ in range(3):
                answers = one.generate(prompts)
                assert [answer.num_cached_tokens for answer in answers] == poolable(one.spec.block_size)
            one.perform("drain")
            assert one.perform("tests.engine.faults:num_calls") == 0
            # The count can fail: of this prompt the engine has nothing.
            one.generate([list(reversed(PROMPTS[0]))])
            one.perform("drain")
            assert one.perform("tests.engine.faults:num_calls") > 0
