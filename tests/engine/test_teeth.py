"""These tests can fail: engines whose loads are wrong give other tokens, for every kind of model.

What tokens cannot show: whole blocks of one prompt that are mistaken for one another. A key carries its position
inside, so full attention sees the same set of keys and values. The conformance suite compares bytes, and does show it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.conftest import assert_same
from tests.engine.engine import Engine
from tests.engine.models import BLOCK_SIZE
from tests.engine.prompts import PROMPTS, poolable
from tests.engine.serving import Answer

CASES = [
    *(("gqa", fault) for fault in ("skip_first_block", "skip_last_layer", "swap_layers")),
    ("mla", "skip_last_layer"),
    ("two-groups", "skip_first_block"),
]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_wrong_bytes_show_in_the_tokens(
    pooled: Callable[..., Engine], baseline: Callable[[str], list[Answer]], kind: str, fault: str
) -> None:
    loading = pooled(kind)
    with loading.fault(fault):
        answers = loading.generate(PROMPTS)
    hits = poolable(BLOCK_SIZE[kind])
    for answer, expected, hit in zip(answers, baseline(kind), hits, strict=True):
        assert answer.num_cached_tokens == hit
        if hit:
            assert answer.tokens != expected.tokens
            with pytest.raises(AssertionError):
                assert_same([answer], [expected])
        else:
            assert_same([answer], [expected])
