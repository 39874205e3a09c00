"""The models are worth testing with: every part of the context shows in the tokens.

Without this a pool that loads garbage could pass for one that works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tests.engine.models import KINDS
from tests.engine.prompts import PROMPTS

NUM_TOKENS = 8


def greedy(model: PreTrainedModel, last: Sequence[int], cache: DynamicCache) -> list[int]:
    """Greedy tokens after `last`, with what came before in `cache`."""
    found: list[int] = []
    given = torch.tensor([last])
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits = model(input_ids=given, past_key_values=cache, use_cache=True).logits
            found.append(int(logits[0, -1].argmax()))
            given = torch.tensor([[found[-1]]])
    return found


def filled(model: PreTrainedModel, prompt: Sequence[int]) -> DynamicCache:
    """The cache after all of a prompt but its last token."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True)
    return cache


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> PreTrainedModel:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(models(request.param), dtype=torch.float32).eval()


def test_tokens_hang_on_the_first_token_of_the_context(model: PreTrainedModel) -> None:
    for prompt in PROMPTS:
        changed = [(prompt[0] + 91) % 250, *prompt[1:]]
        tokens = [greedy(model, p[-1:], filled(model, p)) for p in (prompt, changed)]
        assert tokens[0] != tokens[1]


def test_tokens_do_not_just_repeat(model: PreTrainedModel) -> None:
    tokens = {token for prompt in PROMPTS for token in greedy(model, prompt[-1:], filled(model, prompt))}
    assert len(tokens) > len(PROMPTS) * NUM_TOKENS / 3


@pytest.mark.parametrize("part", ["keys", "values"])
def test_tokens_hang_on_every_layer_of_the_cache(model: PreTrainedModel, part: str) -> None:
    prompt = PROMPTS[0]
    right = greedy(model, prompt[-1:], filled(model, prompt))
    for layer in range(model.config.num_hidden_layers):
        cache = filled(model, prompt)
        getattr(cache.layers[layer], part).zero_()
        assert greedy(model, prompt[-1:], cache) != right, f"{part} of layer {layer}"
