"""One engine computes and saves, a fresh one loads: same tokens, and exactly the tokens that the pool has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import PROMPTS, poolable, tokens
from tests.engine.engine import Answer, EngineSpec, engine
from tests.engine.models import BLOCK_SIZE, KINDS

Spec = Callable[..., EngineSpec]
Baseline = Callable[[str], list[Answer]]


def share(first: EngineSpec, second: EngineSpec, expected: list[Answer]) -> None:
    """Fill with one engine, answer from the pool with another."""
    with engine(first) as saving:
        answers = saving.generate(PROMPTS)
        assert tokens(answers) == tokens(expected)
        assert [answer.num_cached_tokens for answer in answers] == [0] * len(PROMPTS)
    with engine(second) as loading:
        answers = loading.generate(PROMPTS)
        assert tokens(answers) == tokens(expected)
        assert [answer.num_cached_tokens for answer in answers] == poolable(second.block_size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_engine_answers_from_the_pool(spec: Spec, baseline: Baseline, kind: str) -> None:
    made = spec(kind, f"sharing-{kind}")
    share(made, made, baseline(kind))


def test_loading_between_steps_and_piece_by_piece(spec: Spec, baseline: Baseline) -> None:
    first = spec("gqa", "async", {"transfer": "direct"})
    share(first, spec("gqa", "async", {"transfer": "direct", "load_async": True}), baseline("gqa"))


@pytest.mark.parametrize("block_size", [64, 128])
def test_block_sizes(spec: Spec, baseline: Baseline, block_size: int) -> None:
    made = spec("gqa", f"block-{block_size}", block_size=block_size)
    share(made, made, baseline("gqa"))


def test_two_tensor_parallel_ranks(spec: Spec, models: Callable[[str], Path]) -> None:
    plain = EngineSpec(models("gqa"), BLOCK_SIZE["gqa"], tensor_parallel_size=2)
    with engine(plain) as running:
        expected = running.generate(PROMPTS)
    made = spec("gqa", "tp2", tensor_parallel_size=2)
    share(made, made, expected)


def test_the_configuration_of_vllm_ascend_with_one_line_added(spec: Spec, baseline: Baseline) -> None:
    extra = {
        "backend": "mooncake",
        "lookup_rpc_port": "0",
        "load_async": False,
        "use_layerwise": False,
        "save_decode_cache": False,
        "discard_partial_chunks": True,
    }
    made = spec("gqa", "ascend-name", extra, connector="AscendStoreConnector", processes=True)
    share(made, made, baseline("gqa"))


def test_c17_the_next_turn_hits_the_answer_of_this_one(spec: Spec, models: Callable[[str], Path]) -> None:
    made = spec("gqa", "turns", {"save_decode_cache": True})
    question = PROMPTS[0]
    with engine(made) as first:
        (answer,) = first.generate([question], max_tokens=70)
    turn = [*question, *answer.tokens, 1, 2, 3]
    with engine(EngineSpec(models("gqa"), made.block_size)) as plain:
        expected = plain.generate([turn])
    with engine(made) as second:
        (got,) = second.generate([turn])
    assert got.tokens == expected[0].tokens
    # The last token of an answer is never computed on, so the blocks up to the one before it are there.
    assert got.num_cached_tokens == (len(question) + len(answer.tokens) - 1) // 32 * 32


def test_chunked_prefill_stores_every_block(spec: Spec, baseline: Baseline) -> None:
    made = spec("gqa", "chunks", arguments={"max_num_batched_tokens": 64, "max_num_seqs": 4})
    share(made, made, baseline("gqa"))
