"""One engine computes and saves, a fresh one loads: same tokens, and exactly the tokens that the pool has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool_connector.history import ask_engines
from tests.engine.conftest import (
    assert_answered_from_pool,
    assert_fills_and_answers_from,
    assert_same,
    loads,
    num_objects,
)
from tests.engine.engine import Engine, engine
from tests.engine.models import BLOCK_SIZE, KINDS
from tests.engine.prompts import PROMPTS, poolable, unseen
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

Spec = Callable[..., EngineSpec]
Filled = Callable[[str], EngineSpec]
Pooled = Callable[..., Engine]
Plain = Callable[[str], Engine]
Baseline = Callable[[str], list[Answer]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_engine_answers_from_the_pool(filled: Filled, baseline: Baseline, kind: str) -> None:
    with engine(filled(kind)) as fresh:
        assert_answered_from_pool(fresh, baseline(kind), num_objects(kind, BLOCK_SIZE[kind]))


def test_loading_between_steps_and_piece_by_piece_what_was_saved_packed(
    filled: Filled, pooled: Pooled, baseline: Baseline
) -> None:
    filled("gqa")
    assert_answered_from_pool(pooled("gqa", between=True), baseline("gqa"), num_objects("gqa", BLOCK_SIZE["gqa"]))


def test_loading_packed_what_was_saved_piece_by_piece(pooled: Pooled, plain: Plain) -> None:
    prompts = [[token + 2 for token in prompt] for prompt in PROMPTS]
    expected = plain("gqa").generate(prompts)
    saving = pooled("gqa", between=True)
    assert_same(saving.generate(prompts), expected)
    saving.forget()
    answers = pooled("gqa").generate(prompts)
    assert_same(answers, expected)
    assert [answer.num_cached_tokens for answer in answers] == poolable(BLOCK_SIZE["gqa"])


def test_c3_objects_cut_along_the_layers(spec: Spec, baseline: Baseline) -> None:
    with engine(spec("gqa", "cut", {"prefill_pp_size": 2})) as one:
        assert_fills_and_answers_from(one, baseline("gqa"), 2 * num_objects("gqa", BLOCK_SIZE["gqa"]))


@pytest.mark.parametrize("block_size", [64, 128])
def test_block_sizes(spec: Spec, baseline: Baseline, block_size: int) -> None:
    with engine(spec("gqa", f"block-{block_size}", block_size=block_size)) as one:
        assert_fills_and_answers_from(one, baseline("gqa"), num_objects("gqa", block_size))


def test_what_the_engine_still_has_is_not_loaded(pooled: Pooled) -> None:
    running = pooled("gqa")
    longer = [[*prompt, *range(70)] for prompt in PROMPTS]
    running.generate(PROMPTS)
    before = loads(running.counts())
    answers = running.generate(longer)
    # All of a prompt's full blocks are in the local cache now, and nothing beyond them is in the pool.
    assert [a.num_cached_tokens for a in answers] == [len(prompt) // 32 * 32 for prompt in PROMPTS]
    assert loads(running.counts()) == before


def test_h2_an_engine_tells_what_it_decided_about_a_request(pooled: Pooled) -> None:
    running, prompt = pooled("gqa"), unseen("explained")[0]
    running.generate([prompt])
    running.forget()
    running.generate([[*prompt, *range(70)]])
    known = [decision for decision in ask_engines("")[1] if decision.num_tokens == len(prompt) + 70]
    (decision,) = known[-1:]
    whole = len(prompt) // 32 * 32
    assert (decision.result, decision.engine_tokens, decision.hit_tokens) == ("hit", 0, whole)
    assert (decision.loaded_tokens, decision.block, len(decision.missing_keys)) == (whole, whole // 32, 1)


def test_two_tensor_parallel_ranks(spec: Spec, baseline: Baseline) -> None:
    with engine(spec("gqa", "tp2", tensor_parallel_size=2)) as both:
        # Each rank reads its own heads.
        assert_fills_and_answers_from(both, baseline("gqa"), 2 * num_objects("gqa", BLOCK_SIZE["gqa"]))


def test_a_latent_cache_is_shared_between_sizes_of_tensor_parallelism(
    filled: Filled, pooled: Pooled, spec: Spec, plain: Plain, baseline: Baseline
) -> None:
    filled("mla")
    others = unseen("tensor parallel")
    expected = plain("mla").generate(others)
    with engine(spec("mla", tensor_parallel_size=2)) as both:
        # The cache is replicated: both ranks read every block.
        assert_answered_from_pool(both, baseline("mla"), 2 * num_objects("mla", BLOCK_SIZE["mla"]))
        assert_same(both.generate(others), expected)
    # Each of the two wrote its share, and together they wrote everything.
    answers = pooled("mla").generate(others)
    assert_same(answers, expected)
    assert [answer.num_cached_tokens for answer in answers] == poolable(BLOCK_SIZE["mla"])


def test_the_configuration_of_vllm_ascend_with_one_line_added(
    filled: Filled, pooled: Pooled, spec: Spec, baseline: Baseline
) -> None:
    filled("gqa")
    others = unseen("vllm-ascend")
    extra = {
        "backend": "mooncake",
        "lookup_rpc_port": "0",
        "load_async": False,
        "use_layerwise": False,
        "save_decode_cache": False,
        "discard_partial_chunks": True,
    }
    with engine(spec("gqa", extra=extra, connector="AscendStoreConnector", processes=True)) as one:
        assert_answered_from_pool(one, baseline("gqa"), num_objects("gqa", BLOCK_SIZE["gqa"]))
        expected = one.generate(others)
        assert [answer.num_cached_tokens for answer in expected] == [0] * len(others)
    answers = pooled("gqa").generate(others)
    assert_same(answers, expected)
    assert [answer.num_cached_tokens for answer in answers] == poolable(32)


def test_c17_the_next_turn_hits_the_answer_of_this_one(pooled: Pooled, plain: Plain) -> None:
    question = [(7 * j * j + 3) % 250 for j in range(200)]
    (answer,) = pooled("gqa").generate([question], max_tokens=70)
    turn = [*question, *answer.tokens, 1, 2, 3]
    got = pooled("gqa").generate([turn])
    assert_same(got, plain("gqa").generate([turn]))
    # The last token of an answer is never computed on, so the blocks up to the one before it are there.
    assert got[0].num_cached_tokens == (len(question) + len(answer.tokens) - 1) // 32 * 32


def test_two_namespaces_do_not_share(filled: Filled, spec: Spec, baseline: Baseline) -> None:
    filled("gqa")
    with engine(spec("gqa", "another-namespace")) as running:
        answers = running.generate(PROMPTS)
        assert_same(answers, baseline("gqa"))
        assert [answer.num_cached_tokens for answer in answers] == [0] * len(PROMPTS)


def test_two_salts_do_not_share(pooled: Pooled, plain: Plain) -> None:
    prompts = [[(token * 3 + 1) % 250 for token in prompt] for prompt in PROMPTS]
    expected = plain("gqa").generate(prompts)
    for salt in ("one", "another"):
        for hits in ([0] * len(prompts), poolable(BLOCK_SIZE["gqa"])):
            answers = pooled("gqa").generate(prompts, salt=salt)
            assert_same(answers, expected)
            assert [answer.num_cached_tokens for answer in answers] == hits
