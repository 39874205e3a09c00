"""An engine whose block hashes are not the pool's hits nothing, and says at start what to set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.conftest import assert_fills_and_answers_from, assert_same, num_objects
from tests.engine.engine import engine
from tests.engine.models import BLOCK_SIZE
from tests.engine.prompts import PROMPTS, poolable
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

CBOR = {"prefix_caching_hash_algo": "sha256_cbor"}
REMEDY = "Start this engine with PYTHONHASHSEED=0 and with --prefix-caching-hash-algo sha256;"


@pytest.mark.parametrize(("seed", "arguments"), [("7", {}), ("0", CBOR)])
def test_b11_an_engine_with_other_hashes_says_so_and_serves_all_the_same(
    spec: Callable[..., EngineSpec], baseline: Callable[[str], list[Answer]], seed: str, arguments: dict[str, Any]
) -> None:
    namespace = f"hashes-{seed}"
    with engine(spec("gqa", namespace)) as first:
        assert_fills_and_answers_from(first, baseline("gqa"), num_objects("gqa", BLOCK_SIZE["gqa"]))
        assert "event=other_hashes" not in first.printed()
    with engine(spec("gqa", namespace, hash_seed=seed, arguments=arguments)) as other:
        assert "event=other_hashes" in other.printed()
        assert REMEDY in other.printed()
        answers = other.generate(PROMPTS)
        assert_same(answers, baseline("gqa"))
        assert [answer.num_cached_tokens for answer in answers] == [0] * len(PROMPTS)
    with engine(spec("gqa", namespace)) as like_the_first:
        assert "event=other_hashes" not in like_the_first.printed()
        answers = like_the_first.generate(PROMPTS)
        assert_same(answers, baseline("gqa"))
        assert [answer.num_cached_tokens for answer in answers] == poolable(BLOCK_SIZE["gqa"])
