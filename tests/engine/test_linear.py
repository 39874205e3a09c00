"""A model with linear attention: four KV cache groups, of which three hold states.

Its kernels take bf16 alone, where a prompt computed in other pieces gives other tokens. So engines that are compared
compute alike: whole prompts, up to the last whole block and the rest, which is how the engine itself cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.conftest import assert_answered_from_pool, assert_fills_and_answers_from, assert_same, num_objects
from tests.engine.engine import Engine, engine
from tests.engine.models import BLOCK_SIZE, LINEAR, STATE_BYTES
from tests.engine.prompts import PROMPTS, poolable
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

Spec = Callable[..., EngineSpec]
Baseline = Callable[[str], list[Answer]]
NUM_OBJECTS = num_objects(LINEAR, BLOCK_SIZE[LINEAR])
HITS = poolable(BLOCK_SIZE[LINEAR])


@pytest.fixture(scope="module")
def filled(spec: Spec, baseline: Baseline) -> Iterator[Engine]:
    """An engine that has computed `PROMPTS`, saved them, and forgotten them."""
    with engine(spec(LINEAR, LINEAR)) as one:
        answers = one.generate(PROMPTS)
        assert_same(answers, baseline(LINEAR))
        assert [answer.num_cached_tokens for answer in answers] == [0] * len(PROMPTS)
        yield one


@pytest.fixture
def emptied(filled: Engine) -> Engine:
    filled.forget()
    return filled


def test_answers_come_from_the_pool(emptied: Engine, baseline: Baseline) -> None:
    assert_answered_from_pool(emptied, baseline(LINEAR), NUM_OBJECTS)
    emptied.assert_at_rest()


@pytest.mark.parametrize("fault", ["lose_first", "lose_middle", "lose_last"])
def test_a9_lost_states_are_computed_instead(emptied: Engine, baseline: Baseline, fault: str) -> None:
    with emptied.fault(fault):
        assert_same(emptied.generate(PROMPTS), baseline(LINEAR))
    emptied.assert_at_rest()


@pytest.mark.parametrize("fault", [("skip_first_block",), ("clear_objects_of", STATE_BYTES)], ids=" ".join)
def test_wrong_states_show_in_the_tokens(emptied: Engine, baseline: Baseline, fault: tuple[str, ...]) -> None:
    with emptied.fault(*fault):
        answers = emptied.generate(PROMPTS)
    assert [answer.num_cached_tokens for answer in answers] == HITS
    wrong = [answer.tokens != right.tokens for answer, right in zip(answers, baseline(LINEAR), strict=True)]
    assert wrong == [hit > 0 for hit in HITS]


def test_layers_with_states_go_when_the_step_ends(spec: Spec, baseline: Baseline) -> None:
    layers = {"use_layerwise": True, "layerwise_layers_per_transfer": 1}
    with engine(spec(LINEAR, "linear-layers", layers, patches=("tests.engine.faults:no_whole_puts",))) as one:
        assert_fills_and_answers_from(one, baseline(LINEAR), NUM_OBJECTS)


def test_b1_each_rank_has_states_of_its_own(spec: Spec, baseline: Baseline) -> None:
    with engine(spec(LINEAR, "linear-tp2", tensor_parallel_size=2)) as both:
        expected = both.generate(PROMPTS)
        both.forget()
        answers = both.generate(PROMPTS)
        assert_same(answers, expected)
        assert [answer.num_cached_tokens for answer in answers] == HITS
