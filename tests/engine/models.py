"""Tiny models with random weights and a byte-level tokenizer, made on the spot: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 300
MAX_LENGTH = 4096
SLIDING_WINDOW = 64
"""Tokens, of the layers of the kind `two-groups` that have one."""
KINDS = ("gqa", "mla", "two-groups")
"""Kinds whose caches hold tokens alone."""
LINEAR = "linear"
"""A kind with linear attention in all but the last layer: a block of theirs holds a state."""
NUM_LINEAR = 3
"""Its layers with states, each a KV cache group."""
STATE_BYTES = "35840"
"""Of one layer: a convolution's last 3 of 512 columns, and 4 heads of 64 by 64, in bf16."""
BLOCK_SIZE = {"gqa": 32, "mla": 16, "two-groups": 32, LINEAR: 96}
"""vLLM on a CPU takes these: MLA 16, else multiples of 32; with states as many tokens as have a state's bytes."""


def make_model(kind: str, directory: Path, num_layers: int = 3, hidden_size: int = 256) -> Path:
    """Write a model of a kind and its tokenizer, unless they are there; returns their directory."""
    path = directory / f"{kind}-{num_layers}-{hidden_size}"
    if (path / "done").exists():
        return path
    import torch

    torch.manual_seed(7)
    model = MAKERS[kind](num_layers, hidden_size)
    _randomise(model)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    (path / "done").touch()
    return path


GAINS = {
    **dict.fromkeys(("q_proj", "k_proj", "kv_a_proj"), 1.5),
    "kv_b_proj": 2.5,
    **dict.fromkeys(("v_proj", "o_proj"), 4.0),
    "lm_head": 2.0,
}
"""Spread of a matrix's weights against that which keeps a signal's size; 1 for those not listed."""
EMBEDDING_SPREAD = 0.3


SLOW_DECAY = {"A_log": -4.0, "dt_bias": -2.0}
"""Of a state: what came first must show in it for some hundred tokens."""


def _randomise(model: Any) -> None:
    """Weights under which every token hangs on the whole context.

    What attention brings outweighs what a token brings itself. With one spread for all weights the last token decides
    the next, such a model soon repeats itself, and a cache full of garbage would go unnoticed.
    """
    import torch

    for name, parameter in model.named_parameters():
        if (last := name.rsplit(".", 1)[-1]) in SLOW_DECAY:
            torch.nn.init.constant_(parameter, SLOW_DECAY[last])
        elif parameter.dim() == 1 or name.endswith("bias"):
            torch.nn.init.constant_(parameter, float(name.endswith("norm.weight") or "layernorm" in name))
        elif "embed_tokens" in name:
            torch.nn.init.normal_(parameter, std=EMBEDDING_SPREAD)
        else:
            gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
            # Matrices are (out, in), but those of several experts (experts, in, out).
            fan_in = parameter.shape[1]
            torch.nn.init.normal_(parameter, std=gain / fan_in**0.5)


def _qwen2(num_layers: int, hidden_size: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=hidden_size // 64,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=False,
        )
    )


def _deepseek_v2(num_layers: int, hidden_size: int) -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=hidden_size,
            moe_intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )


def _gpt_oss(num_layers: int, hidden_size: int) -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention"]
    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=hidden_size,
            num_hidden_layers=num_layers + num_layers % 2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=SLIDING_WINDOW,
            layer_types=kinds * ((num_layers + 1) // 2),
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 1024,
                "truncate": False,
            },
        )
    )


def _qwen3_next(num_layers: int, hidden_size: int) -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=hidden_size,
            num_hidden_layers=num_layers + 1,
            full_attention_interval=num_layers + 1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            linear_conv_kernel_dim=4,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            # vLLM wants one layer of experts.
            mlp_only_layers=list(range(num_layers)),
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=False,
        )
    )


MAKERS: dict[str, Callable[[int, int], Any]] = {
    "gqa": _qwen2,
    "mla": _deepseek_v2,
    "two-groups": _gpt_oss,
    LINEAR: _qwen3_next,
}


def _tokenizer() -> Any:
    """A token a byte, and specials."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    specials = ["<pad>", "<s>", "</s>"]
    vocabulary.update({special: len(vocabulary) + i for i, special in enumerate(specials)})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
