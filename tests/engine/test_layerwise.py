"""Layer by layer on the real engine: its hooks fire as they must, and tokens are those of whole-request transfer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.conftest import assert_answered_from_pool, assert_same, num_objects
from tests.engine.engine import engine
from tests.engine.models import KINDS
from tests.engine.prompts import PROMPTS
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

Spec = Callable[..., EngineSpec]
Baseline = Callable[[str], list[Answer]]

LAYERS = {"use_layerwise": True, "layerwise_layers_per_transfer": 1}


def share(saving: EngineSpec, loading: EngineSpec, expected: list[Answer], num_blocks: int) -> None:
    """Fill with one engine, answer from the pool with another."""
    with engine(saving) as first:
        assert_same(first.generate(PROMPTS), expected)
    with engine(loading) as second:
        assert_answered_from_pool(second, expected, num_blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_layer_by_layer(spec: Spec, baseline: Baseline, kind: str) -> None:
    saving = spec(kind, f"layers-{kind}", LAYERS, patches=("tests.engine.faults:no_whole_puts",))
    # A model with several groups loads between steps, where there is nothing to overlap with: whole blocks.
    patches = () if kind == "two-groups" else ("tests.engine.faults:no_whole_gets",)
    share(
        saving,
        spec(kind, f"layers-{kind}", LAYERS, patches=patches),
        baseline(kind),
        num_objects(kind, saving.block_size),
    )


@pytest.mark.parametrize("by_layers", ["saving", "loading"])
def test_whole_request_transfer_and_layers_serve_each_other(spec: Spec, baseline: Baseline, by_layers: str) -> None:
    namespace = f"layers-{by_layers}"
    layers = spec("gqa", namespace, LAYERS)
    whole = spec("gqa", namespace)
    share(
        *((layers, whole) if by_layers == "saving" else (whole, layers)),
        baseline("gqa"),
        num_objects("gqa", whole.block_size),
    )


def test_chunked_prefill_layer_by_layer(spec: Spec, baseline: Baseline) -> None:
    chunks = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    made = spec("gqa", "layer-chunks", LAYERS, arguments=chunks)
    share(made, made, baseline("gqa"), num_objects("gqa", made.block_size))
