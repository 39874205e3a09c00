"""Layer by layer on the real engine: its hooks fire as they must, and tokens are those of whole-request transfer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.engine import Answer, EngineSpec
from tests.engine.models import KINDS
from tests.engine.test_sharing import share

Spec = Callable[..., EngineSpec]
Baseline = Callable[[str], list[Answer]]

LAYERS = {"use_layerwise": True, "layerwise_layers_per_transfer": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_layer_by_layer(spec: Spec, baseline: Baseline, kind: str) -> None:
    saving = spec(kind, f"layers-{kind}", LAYERS, patches=("tests.engine.faults:no_whole_puts",))
    # A model with several groups loads between steps, where there is nothing to overlap with: whole blocks.
    patches = () if kind == "two-groups" else ("tests.engine.faults:no_whole_gets",)
    share(saving, spec(kind, f"layers-{kind}", LAYERS, patches=patches), baseline(kind))


@pytest.mark.parametrize("by_layers", ["saving", "loading"])
def test_whole_request_transfer_and_layers_serve_each_other(spec: Spec, baseline: Baseline, by_layers: str) -> None:
    namespace = f"layers-{by_layers}"
    layers = spec("gqa", namespace, LAYERS)
    whole = spec("gqa", namespace)
    share(*((layers, whole) if by_layers == "saving" else (whole, layers)), baseline("gqa"))


def test_chunked_prefill_layer_by_layer(spec: Spec, baseline: Baseline) -> None:
    chunks = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    made = spec("gqa", "layer-chunks", LAYERS, arguments=chunks)
    share(made, made, baseline("gqa"))
