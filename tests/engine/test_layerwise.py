"""Layer by layer on the real engine: its hooks fire as they must, and tokens are those of whole-request transfer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.conftest import assert_answered_from_pool, assert_fills_and_answers_from, assert_same, num_objects
from tests.engine.engine import Engine, engine
from tests.engine.models import BLOCK_SIZE, KINDS
from tests.engine.prompts import poolable, unseen
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

Spec = Callable[..., EngineSpec]
Filled = Callable[[str], EngineSpec]
Pooled = Callable[..., Engine]
Plain = Callable[[str], Engine]
Baseline = Callable[[str], list[Answer]]

LAYERS = {"use_layerwise": True, "layerwise_layers_per_transfer": 1}
FAULTS = ("save_hook_faults", "load_hook_faults", "save_blocks_dropped_hooks", "save_blocks_dropped_lost")


def no_faults(one: Engine) -> None:
    """Every hook was called as it must be, and no object was lost."""
    counts = one.counts()
    assert not {name: counts[name] for name in FAULTS if counts.get(name)}


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_layer_by_layer(spec: Spec, plain: Plain, baseline: Baseline, kind: str) -> None:
    # A model with several groups loads between steps, where there is nothing to overlap with: whole blocks.
    no_gets = () if kind == "two-groups" else ("tests.engine.faults:no_whole_gets",)
    patches = ("tests.engine.faults:no_whole_puts", *no_gets)
    with engine(spec(kind, f"layers-{kind}", LAYERS, patches=patches)) as one:
        assert_fills_and_answers_from(one, baseline(kind), num_objects(kind, BLOCK_SIZE[kind]))
        no_faults(one)
        one.assert_at_rest()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_read_from_what_whole_request_transfer_saved_and_the_other_way_round(
    filled: Filled, pooled: Pooled, spec: Spec, plain: Plain, baseline: Baseline, kind: str
) -> None:
    filled(kind)
    others = unseen(f"both ways {kind}")
    expected = plain(kind).generate(others)
    no_gets = () if kind == "two-groups" else ("tests.engine.faults:no_whole_gets",)
    patches = ("tests.engine.faults:no_whole_puts", *no_gets)
    with engine(spec(kind, extra=LAYERS, patches=patches)) as layers:
        assert_answered_from_pool(layers, baseline(kind), num_objects(kind, BLOCK_SIZE[kind]))
        assert_same(layers.generate(others), expected)
        no_faults(layers)
        layers.forget()
    answers = pooled(kind).generate(others)
    assert_same(answers, expected)
    assert [answer.num_cached_tokens for answer in answers] == poolable(BLOCK_SIZE[kind])


@pytest.mark.parametrize("grouped", [2, None])
def test_chunked_prefill_with_layers_grouped(spec: Spec, baseline: Baseline, grouped: int | None) -> None:
    chunks = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    settings = {**LAYERS, "layerwise_layers_per_transfer": grouped, "layerwise_prefetch_layers": 1}
    with engine(spec("gqa", f"layer-chunks-{grouped}", settings, arguments=chunks)) as one:
        assert_fills_and_answers_from(one, baseline("gqa"), num_objects("gqa", BLOCK_SIZE["gqa"]))
        no_faults(one)


def test_with_checksums_and_an_audit_layer_by_layer(spec: Spec, baseline: Baseline) -> None:
    settings = {**LAYERS, "integrity": "on", "audit_every": 1}
    with engine(spec("mla", "layers-checked", settings, patches=("tests.engine.faults:no_whole_puts",))) as one:
        assert_fills_and_answers_from(one, baseline("mla"), num_objects("mla", BLOCK_SIZE["mla"]))
        no_faults(one)
        counts = one.counts()
        assert counts["audit_blocks_ok"] == counts["save_blocks_stored"] > 0
        assert not counts.get("load_blocks_corrupt")


def test_two_tensor_parallel_ranks_layer_by_layer(spec: Spec, baseline: Baseline) -> None:
    with engine(spec("gqa", "layers-tp2", LAYERS, tensor_parallel_size=2)) as both:
        # Each rank reads its own heads.
        assert_fills_and_answers_from(both, baseline("gqa"), 2 * num_objects("gqa", BLOCK_SIZE["gqa"]))
        no_faults(both)


def test_auto_moves_the_blocks_of_a_tiny_model_whole(filled: Filled, spec: Spec, baseline: Baseline) -> None:
    filled("gqa")
    with engine(spec("gqa", extra={"use_layerwise": "auto"}, patches=("tests.engine.faults:no_sessions",))) as one:
        assert_answered_from_pool(one, baseline("gqa"), num_objects("gqa", BLOCK_SIZE["gqa"]))
