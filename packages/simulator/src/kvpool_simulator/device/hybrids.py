"""Caches in which layers of different groups share memory (vLLM-Ascend main, August 2026).

Block ids are unique over groups, so layers of different groups may lie on the same bytes: a block is one group's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool_simulator.device.families import BF16, FP8, FP16, FP32, INT8, separate
from kvpool_simulator.device.spec import CacheSpec, Component, Container, Entry, RawTensor, Region, View


def state_components(
    conv_shape: tuple[int, ...],
    ssm_shape: tuple[int, ...],
    conv_dtype: torch.dtype = BF16,
    ssm_dtype: torch.dtype = FP32,
) -> tuple[Component, Component]:
    """`conv` and `ssm` of one block; a state counts no tokens."""
    return Component("conv", conv_dtype, conv_shape, 0), Component("ssm", ssm_dtype, ssm_shape, 0)


def mamba(layer_name: str, states: Sequence[Component], *, group: int = 0) -> CacheSpec:
    """A list `[conv, ssm]`, each contiguous in a raw tensor of its own."""
    return separate(layer_name, states, Container.LIST, group=group)


def attention_and_mamba(
    attention: str,
    mambas: Sequence[str],
    block_size: int,
    num_heads: int,
    head_dim: int,
    states: tuple[Component, Component],
    *,
    padding: int = 0,
    kernel_blocks: int = 1,
    first_head: int = 0,
    dtype: torch.dtype = BF16,
) -> CacheSpec:
    """One attention layer (group 0) and one mamba layer of each further group, in one raw tensor.

    Its regions each run over all blocks: conv, K, ssm, V, then `padding` bytes a block. So K starts wherever the conv
    states end, off the 2 MiB grid. `block_size` counts tokens of a manager block, cut into `kernel_blocks`.
    """
    if block_size % kernel_blocks:
        raise ValueError(f"{attention}: {block_size} tokens do not make {kernel_blocks} kernel blocks")
    tokens = block_size // kernel_blocks
    k, v = (
        Component(n, dtype, (tokens, num_heads, head_dim), tokens, first_head=first_head, num_heads=num_heads)
        for n in ("k", "v")
    )

    def attention_region(component: Component) -> Region:
        return Region(component.kernel_bytes, (View(attention, component),), kernel_blocks)

    def state_region(state: Component) -> Region:
        return Region(state.kernel_bytes, tuple(View(name, state) for name in mambas))

    conv, ssm = states
    regions = [state_region(conv), attention_region(k), state_region(ssm), attention_region(v)]
    if padding:
        regions.append(Region(padding))
    entries = [Entry(attention), *(Entry(name, Container.LIST, 1 + i) for i, name in enumerate(mambas))]
    return CacheSpec(tuple(entries), (RawTensor(tuple(regions)),))


def deepseek_v4(
    layer_prefix: str,
    block_size: int = 128,
    *,
    head_dim: int = 512,
    index_head_dim: int = 128,
    a5: bool = False,
    scale_dtype: torch.dtype = FP16,
) -> CacheSpec:
    """One layer slot of DeepSeek V4: two raw tensors, each shared by groups, every cache a list of strided views.

    Pages of 131,072 bytes (`block_size * head_dim` in bf16) hold, by group:
    0, the sliding window: latents of 128 tokens. 1, compressed: latents of 128 tokens.
    2, states of the compressor of 4 to 1, fp32, 8 tokens: half the page, then a hole.
    3, states of the compressor of 128 to 1, fp32, 32 tokens: the whole page.
    Pages of 16,640 bytes hold k and scale of group 1's indexer, interleaved page by page (k at 0, scale at 16,384),
    or group 2's states of its compressor. On `a5` k is fp8, and a third view covers k and scale together.

    Which entries share a page class, and the states' shapes, are a choice made here; page sizes, tokens, dtypes and
    offsets of the indexer are vLLM-Ascend's.
    """
    if block_size % 16:
        raise ValueError(f"{layer_prefix}: block_size must be a multiple of 16, found {block_size}")
    main_page = block_size * head_dim * BF16.itemsize
    k = Component("dsa_k", FP8 if a5 else INT8, (block_size, 1, index_head_dim), block_size)
    scale = Component("dsa_k_scale", scale_dtype, (block_size, 1, 1), block_size)
    index_page = k.kernel_bytes + scale.kernel_bytes
    both = Component("dsa_k_and_scale", INT8, (block_size, 1, index_page // block_size), block_size)
    few, many = block_size // 16, block_size // 4
    window, latent = (Component(n, BF16, (block_size, 1, head_dim), block_size) for n in ("window", "latent"))
    names = {
        "window": f"{layer_prefix}.window",
        "attn": f"{layer_prefix}.attn",
        "indexer": f"{layer_prefix}.indexer.k_cache",
        "state_4": f"{layer_prefix}.compressor_4.state",
        "index_state": f"{layer_prefix}.indexer.compressor_4.state",
        "state_128": f"{layer_prefix}.compressor_128.state",
    }
    main = (
        View(names["window"], window),
        View(names["attn"], latent),
        *_states(names["state_4"], few, 2 * head_dim),
        *_states(names["state_128"], many, head_dim),
    )
    index = (
        View(names["indexer"], k),
        View(names["indexer"], scale, k.kernel_bytes),
        *([View(names["indexer"], both, alias=True)] if a5 else []),
        *_states(names["index_state"], few, 2 * index_head_dim),
    )
    groups = {"window": 0, "attn": 1, "indexer": 1, "state_4": 2, "index_state": 2, "state_128": 3}
    entries = tuple(Entry(names[short], Container.LIST, group) for short, group in groups.items())
    return CacheSpec(entries, (RawTensor((Region(main_page, main),)), RawTensor((Region(index_page, index),))))


def _states(layer_name: str, num_tokens: int, width: int) -> tuple[View, View]:
    """`kv_state` and `score_state`, each `(num_tokens, 1, width)` fp32, one behind the other in the page."""
    kv, score = (Component(n, FP32, (num_tokens, 1, width), num_tokens) for n in ("kv_state", "score_state"))
    return View(layer_name, kv), View(layer_name, score, kv.kernel_bytes)
