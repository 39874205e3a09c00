"""From the suite's cases to the simulated device's caches."""

from __future__ import annotations

import torch

from kvpool_conformance.cases import CacheCase
from kvpool_simulator.device import CacheSpec, families, variants
from kvpool_simulator.device.models import head_range

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
}


def cache_spec(case: CacheCase, tp_size: int, rank: int) -> CacheSpec:
    """What one rank registers. Raises `ValueError` for a mixture that no engine has."""
    names = [f"model.layers.{i}.self_attn.attn" for i in range(case.num_layers)]
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
        case.block_size, case.kv_lora_rank, case.rope_dim, dtype=dtype, rope_dtype=rope_dtype
    )
    if case.family == "mla":
        return families.separate(name, main)
    c8, a5 = bool(case.c8), case.c8 == "fp8"
    indexer = families.indexer_components(case.block_size, case.index_dim, c8=c8, a5=a5, dtype=dtype)
    if case.family == "sparse-bundled":
        return families.sparse_bundled(name, main, indexer) if indexed else families.separate(name, main)
    attention = (
        families.packed_main(name, case.block_size, case.kv_lora_rank, case.rope_dim)
        if case.family == "packed-main"
        else families.separate(name, main)
    )
    return attention + families.indexer_cache(name, indexer) if indexed else attention


def content_name(layer_name: str) -> str:
    """The name of a layer in its content: the same whether its indexer is bundled or an entry of its own."""
    return layer_name.replace(".indexer.k_cache", ".attn")
