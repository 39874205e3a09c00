"""From the suite's cases to the simulated device's caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool_conformance.cases import OTHER_FAMILIES, CacheCase
from kvpool_simulator.device import CacheSpec, families, hybrids, variants
from kvpool_simulator.device.models import head_range

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def cache_spec(case: CacheCase, tp_size: int, rank: int) -> CacheSpec:
    """What one rank registers. Raises `ValueError` for a mixture that no engine has."""
    if case.indexer_copies not in (1, case.indexer_copies if case.family == "sparse-split" else 1):
        raise ValueError("only an indexer with a cache entry of its own has copies")
    names = [f"model.layers.{i}.self_attn.attn" for i in range(case.num_layers)]
    if case.family in OTHER_FAMILIES:
        spec = _other(case, names, tp_size, rank)
        spec.validate()
        return spec
    layers = [_layer(case, name, tp_size, rank, i not in case.layers_without_indexer) for i, name in enumerate(names)]
    if case.mtp:
        layers.append(_layer(case, "mtp.layers.0.self_attn.attn", tp_size, rank, True))
    spec = CacheSpec.join(layers)
    if case.kernel_blocks > 1:
        spec = variants.in_kernel_blocks(spec, case.kernel_blocks)
    if case.padding:
        spec = variants.padded(spec, case.padding)
    if case.one_storage:
        spec = variants.in_one_storage(spec)
    if case.shared_layer:
        spec = variants.sharing(spec, f"model.layers.{case.num_layers}.self_attn.attn", names[0])
    spec.validate()
    return spec


def _layer(case: CacheCase, name: str, tp_size: int, rank: int, indexed: bool) -> CacheSpec:
    dtype = DTYPES[case.dtype]
    if case.family == "gqa":
        first, count = head_range(case.num_heads, tp_size, rank)
        return families.gqa(
            name, case.block_size, count, case.head_dim, v_head_dim=case.v_head_dim, first_head=first, dtype=dtype
        )
    rope_dtype = DTYPES[case.rope_dtype] if case.rope_dtype else None
    main = families.mla_components(
        case.block_size, case.kv_lora_rank, case.rope_dim, dtype=dtype, rope_dtype=rope_dtype, nz=case.kv_nz
    )
    if case.family == "mla":
        return families.separate(name, main)
    c8, a5 = bool(case.c8), case.c8 == "fp8"
    indexer = families.indexer_components(case.block_size, case.index_dim, c8=c8, a5=a5, dtype=dtype)
    if case.family == "sparse-bundled":
        if not indexed:
            return families.separate(name, main)
        return families.sparse_bundled(name, main, indexer, reserve_half_page=case.reserved)
    attention = (
        families.packed_main(
            name, case.block_size, case.kv_lora_rank, case.rope_dim, dtype if dtype.itemsize == 1 else families.INT8
        )
        if case.family == "packed-main"
        else families.separate(name, main)
    )
    return attention + families.indexer_cache(name, indexer, copies=case.indexer_copies) if indexed else attention


def _other(case: CacheCase, names: Sequence[str], tp_size: int, rank: int) -> CacheSpec:
    dtype, block = DTYPES[case.dtype], case.block_size
    states = hybrids.state_components((3, 20), (2, 8, 4))
    if case.family == "gqa-310p":
        first, count = head_range(case.num_heads, tp_size, rank)
        return CacheSpec.join(
            families.gqa_310p(name, block, count, case.head_dim, first_head=first, dtype=dtype) for name in names
        )
    if case.family == "cache-only":
        stride = block * case.head_dim * dtype.itemsize + case.padding
        return CacheSpec.join(
            families.cache_only(name, block, case.head_dim, page_stride=stride, dtype=dtype) for name in names
        )
    if case.family == "mamba":
        return CacheSpec.join(hybrids.mamba(name.replace("self_attn.attn", "mamba"), states) for name in names)
    if case.family == "attention-and-mamba":
        return CacheSpec.join(
            hybrids.attention_and_mamba(
                f"model.layers.{4 * i + 3}.self_attn.attn",
                [f"model.layers.{4 * i + j}.mamba" for j in range(3)],
                block,
                case.num_heads,
                case.head_dim,
                states,
                padding=24,
                kernel_blocks=case.kernel_blocks,
                dtype=dtype,
            )
            for i in range(case.num_layers)
        )
    a5 = case.family == "deepseek-v4-a5"
    prefixes = [name.removesuffix(".attn") for name in names]
    return CacheSpec.join(
        hybrids.deepseek_v4(prefix, block, head_dim=case.head_dim, index_head_dim=case.index_dim, a5=a5)
        for prefix in prefixes
    )


def content_name(layer_name: str) -> str:
    """The name of a layer in its content: the same whether its indexer is bundled or an entry of its own."""
    return layer_name.replace(".indexer.k_cache", ".attn")
