"""Named models, and the caches that one rank of a deployment of them has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpool_simulator.device import families
from kvpool_simulator.device.spec import CacheSpec


@dataclass(frozen=True)
class Gqa:
    """Split heads."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None


@dataclass(frozen=True)
class Mla:
    """A latent for all heads; with `index_head_dim` sparse attention with an indexer."""

    kv_lora_rank: int
    rope_dim: int
    index_head_dim: int = 0


@dataclass(frozen=True)
class Model:
    """What of a model decides its caches."""

    name: str
    num_layers: int
    attention: Gqa | Mla
    block_size: int = 128
    num_mtp_layers: int = 0
    """MTP layers that the model has; a deployment may leave them out."""
    indexer_layers: frozenset[int] | None = None
    """Base layers that own an indexer, None for all; MTP layers always do."""


# Which 21 layers of GLM-5.2 own an indexer is not known here: evenly spaced ones stand in.
MODELS = {
    model.name: model
    for model in (
        Model("deepseek-v3", 61, Mla(512, 64), num_mtp_layers=1),
        Model("deepseek-v3.2", 61, Mla(512, 64, 128), num_mtp_layers=1),
        Model("glm-5.2", 78, Mla(512, 64, 128), num_mtp_layers=1, indexer_layers=frozenset([*range(0, 78, 4), 77])),
        Model("qwen3-32b", 64, Gqa(8, 128)),
        Model("qwen3-235b", 94, Gqa(4, 128)),
        Model("tiny-deepseek-v3", 3, Mla(32, 8), 16, num_mtp_layers=1),
        Model("tiny-deepseek-v3.2", 3, Mla(32, 8, 16), 16, num_mtp_layers=1),
        Model("tiny-glm-5.2", 6, Mla(32, 8, 16), 16, num_mtp_layers=1, indexer_layers=frozenset([0, 4])),
        Model("tiny-qwen3-32b", 4, Gqa(2, 64), 16),
        Model("tiny-qwen3-235b", 3, Gqa(4, 32), 16),
        Model("tiny-one-head", 2, Gqa(1, 32), 16),
        Model("tiny-eight-heads", 2, Gqa(8, 32), 16),
        # As many layers and tokens a block as the real one, and few bytes a token.
        Model("narrow-deepseek-v3.2", 61, Mla(32, 8, 16), 128, num_mtp_layers=1),
    )
}


def model(name: str) -> Model:
    """The model of this name."""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}: have {', '.join(sorted(MODELS))}")
    return MODELS[name]


def head_range(num_kv_heads: int, tp: int, tp_rank: int) -> tuple[int, int]:
    """`(first, count)` of the KV heads on a rank; more ranks than heads hold each head several times."""
    if not 0 <= tp_rank < tp:
        raise ValueError(f"tp_rank must be in 0..{tp - 1}: found {tp_rank}")
    if num_kv_heads % tp == 0:
        count = num_kv_heads // tp
        return tp_rank * count, count
    if tp % num_kv_heads == 0:
        return tp_rank // (tp // num_kv_heads), 1
    raise ValueError(f"tp {tp} and {num_kv_heads} KV heads do not divide one another: use a tp that does")


def stage_layers(num_layers: int, pp: int, pp_rank: int, partition: tuple[int, ...] | None = None) -> range:
    """Base layers of a pipeline stage. Without `partition`, a remainder goes to the stages before the last."""
    if not 0 <= pp_rank < pp <= num_layers:
        raise ValueError(f"pp_rank {pp_rank} of {pp} stages for {num_layers} layers: need 0 <= rank < pp <= layers")
    if partition is None:
        sizes = [num_layers // pp] * pp
        for i in range(num_layers % pp):
            sizes[-2 - i] += 1
    else:
        sizes = list(partition)
        if len(sizes) != pp or sum(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(f"partition {partition} must be {pp} positive numbers that sum to {num_layers}")
    first = sum(sizes[:pp_rank])
    return range(first, first + sizes[pp_rank])


def rank_spec(
    name: str | Model,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    pp: int = 1,
    pp_rank: int = 0,
    pp_partition: tuple[int, ...] | None = None,
    mtp: bool = False,
    mtp_prefix: str = "mtp.layers",
    sparse: str = "split",
    c8: bool = False,
    a5: bool = False,
    packed: bool = False,
    kv_nz: bool = False,
    indexer_copies: int = 1,
    block_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rope_dtype: torch.dtype | None = None,
) -> CacheSpec:
    """Caches of one rank.

    `sparse`: "split" (two entries, since #11647), "bundled" (one tuple, #6339) or "reserved" (bundled, with the raw
    tensor of the first form). `c8`: quantised indexer, with `a5` in fp8. `packed`: the packed 656-byte main cache.
    `mtp_prefix`: how MTP layers are named; "model.layers" counts them on after the base layers.
    """
    it = model(name) if isinstance(name, str) else name
    block = it.block_size if block_size is None else block_size
    if sparse not in ("split", "bundled", "reserved"):
        raise ValueError(f"sparse must be 'split', 'bundled' or 'reserved': found {sparse!r}")
    has_indexer = isinstance(it.attention, Mla) and it.attention.index_head_dim > 0
    if (c8 or packed or indexer_copies > 1) and not has_indexer:
        raise ValueError(f"{it.name} has no sparse attention: leave out c8, packed and indexer_copies")
    if a5 and not c8:
        raise ValueError("a5 says which quantised indexer: set c8 too")
    if sparse != "split" and (packed or indexer_copies > 1):
        raise ValueError(f"packed main caches and indexer copies came with sparse='split': found {sparse!r}")
    if mtp and not it.num_mtp_layers:
        raise ValueError(f"{it.name} has no MTP layers: leave out mtp")

    def layer(layer_name: str, indexed: bool) -> CacheSpec:
        if isinstance(it.attention, Gqa):
            first, count = head_range(it.attention.num_kv_heads, tp, tp_rank)
            return families.gqa(
                layer_name,
                block,
                count,
                it.attention.head_dim,
                v_head_dim=it.attention.v_head_dim,
                first_head=first,
                dtype=dtype,
            )
        lora, rope = it.attention.kv_lora_rank, it.attention.rope_dim
        main = families.mla_components(block, lora, rope, dtype=dtype, rope_dtype=rope_dtype, nz=kv_nz)
        indexer = (
            families.indexer_components(block, it.attention.index_head_dim, c8=c8, a5=a5, dtype=dtype)
            if indexed
            else []
        )
        if indexer and sparse != "split":
            return families.sparse_bundled(layer_name, main, indexer, reserve_half_page=sparse == "reserved")
        attn = families.packed_main(layer_name, block, lora, rope) if packed else families.separate(layer_name, main)
        return attn + families.indexer_cache(layer_name, indexer, copies=indexer_copies) if indexer else attn

    owners = range(it.num_layers) if it.indexer_layers is None else it.indexer_layers
    layers = [
        layer(f"model.layers.{i}.self_attn.attn", has_indexer and i in owners)
        for i in stage_layers(it.num_layers, pp, pp_rank, pp_partition)
    ]
    if mtp and pp_rank == pp - 1:
        base = it.num_layers if mtp_prefix == "model.layers" else 0
        layers += [layer(f"{mtp_prefix}.{base + i}.self_attn.attn", has_indexer) for i in range(it.num_mtp_layers)]
    return CacheSpec.join(layers)
