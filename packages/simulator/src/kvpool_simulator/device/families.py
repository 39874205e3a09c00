"""The attention caches that vLLM-Ascend allocates, one function a family (vLLM-Ascend main, August 2026).

Every function returns the `CacheSpec` of one layer; K and V, latent and rope, are separate raw tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool_simulator.device.spec import CacheSpec, Component, Container, Entry, Order, RawTensor, Region, View

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn
SCALE_ALIGNMENT = 512
"""Of the scales behind all k blocks in the raw tensor of a C8 indexer, in bytes."""


def separate(
    layer_name: str,
    components: Sequence[Component],
    container: Container = Container.TUPLE,
    *,
    group: int = 0,
    aligned: bool = True,
) -> CacheSpec:
    """An entry whose components are separate, dense raw tensors."""
    raws = (RawTensor((_dense(layer_name, component),), aligned=aligned) for component in components)
    return CacheSpec((Entry(layer_name, container, group),), tuple(raws))


def gqa(
    layer_name: str,
    block_size: int,
    num_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    first_head: int = 0,
    heads_first: bool = False,
    dtype: torch.dtype = BF16,
) -> CacheSpec:
    """`(k, v)`, each `(num_blocks, block_size, num_heads, head_dim)`; V may have another head size.

    `heads_first` (an engine other than vLLM-Ascend): heads before tokens. With as many heads as tokens the shape is
    the same.
    """

    def component(name: str, dim: int) -> Component:
        shape = (num_heads, block_size, dim) if heads_first else (block_size, num_heads, dim)
        return Component(
            name, dtype, shape, block_size, first_head=first_head, num_heads=num_heads, heads_first=heads_first
        )

    return separate(layer_name, [component("k", head_dim), component("v", v_head_dim or head_dim)])


def gqa_310p(
    layer_name: str,
    block_size: int,
    num_heads: int,
    head_dim: int,
    *,
    first_head: int = 0,
    dtype: torch.dtype = FP16,
) -> CacheSpec:
    """`(k, v)` on a 310P, each `(num_blocks, num_heads * head_dim / 16, block_size, 16)`, NZ, on no 2 MiB boundary."""
    if num_heads * head_dim % 16 or head_dim % 16:
        raise ValueError(f"NZ needs a head size that is a multiple of 16: found {head_dim}")
    shape = (num_heads * head_dim // 16, block_size, 16)
    components = [
        Component(n, dtype, shape, block_size, Order.NZ, first_head, num_heads, heads_first=True) for n in ("k", "v")
    ]
    return separate(layer_name, components, aligned=False)


def mla_components(
    block_size: int,
    kv_lora_rank: int,
    rope_dim: int,
    *,
    dtype: torch.dtype = BF16,
    rope_dtype: torch.dtype | None = None,
    nz: bool = False,
) -> list[Component]:
    """`k_nope` `(block_size, 1, kv_lora_rank)` and `k_pe` `(block_size, 1, rope_dim)`.

    With `nz` (`enable_kv_nz`) the shapes are the same and the bytes of a page are in NZ order.
    """
    if nz and (kv_lora_rank % 16 or rope_dim % 16):
        raise ValueError(f"NZ needs sizes that are multiples of 16: found {kv_lora_rank} and {rope_dim}")
    order = Order.NZ if nz else Order.ND
    return [
        Component("k_nope", dtype, (block_size, 1, kv_lora_rank), block_size, order),
        Component("k_pe", rope_dtype or dtype, (block_size, 1, rope_dim), block_size, order),
    ]


def mla(
    layer_name: str,
    block_size: int,
    kv_lora_rank: int,
    rope_dim: int,
    *,
    dtype: torch.dtype = BF16,
    rope_dtype: torch.dtype | None = None,
    nz: bool = False,
) -> CacheSpec:
    """`(k_nope, k_pe)`; under quantisation the two dtypes may differ."""
    return separate(
        layer_name, mla_components(block_size, kv_lora_rank, rope_dim, dtype=dtype, rope_dtype=rope_dtype, nz=nz)
    )


def indexer_components(
    block_size: int, index_head_dim: int, *, c8: bool = False, a5: bool = False, dtype: torch.dtype = BF16
) -> list[Component]:
    """`dsa_k`, and under C8 its scale a token: int8 with fp16, on A5 fp8 e4m3 with fp32."""
    k_dtype = (FP8 if a5 else INT8) if c8 else dtype
    k = Component("dsa_k", k_dtype, (block_size, 1, index_head_dim), block_size)
    scale = Component("dsa_k_scale", FP32 if a5 else FP16, (block_size, 1, 1), block_size)
    return [k, scale] if c8 else [k]


def sparse_bundled(
    layer_name: str, main: Sequence[Component], indexer: Sequence[Component], *, reserve_half_page: bool = False
) -> CacheSpec:
    """One entry `(k_nope, k_pe, dsa_k)`, with C8 also `dsa_k_scale` (#6339).

    `reserve_half_page`: the raw tensor of `dsa_k` is as large as those of latent and rope together, as in the very
    first form. The view uses its beginning.
    """
    spec = separate(layer_name, [*main, *indexer])
    if not reserve_half_page:
        return spec
    unused = sum(component.kernel_bytes for component in main) - indexer[0].kernel_bytes
    raws = list(spec.raw_tensors)
    raws[len(main)] = RawTensor((*raws[len(main)].regions, Region(unused)))
    return CacheSpec(spec.entries, tuple(raws))


def indexer_cache(layer_name: str, indexer: Sequence[Component], *, copies: int = 1) -> CacheSpec:
    """The entry `….indexer.k_cache` (#11647): `(dsa_k,)`, or k and scale as views of one raw tensor.

    `copies`: blocks of the indexer a block of the main cache, under decode context parallelism.
    """
    name = f"{layer_name.removesuffix('.attn')}.indexer.k_cache"
    regions = [
        Region(c.kernel_bytes, (View(name, c),), copies, SCALE_ALIGNMENT if i else 1) for i, c in enumerate(indexer)
    ]
    return CacheSpec((Entry(name),), (RawTensor(tuple(regions)),))


def sparse_split(
    layer_name: str, main: Sequence[Component], indexer: Sequence[Component], *, copies: int = 1
) -> CacheSpec:
    """Two entries: `….attn` `(k_nope, k_pe)` and `….indexer.k_cache` (#11647, July 2026)."""
    return separate(layer_name, main) + indexer_cache(layer_name, indexer, copies=copies)


def packed_main(
    layer_name: str, block_size: int, kv_lora_rank: int = 512, rope_dim: int = 64, dtype: torch.dtype = INT8
) -> CacheSpec:
    """One tensor `(num_blocks, block_size, 1, 656)`: latent in 1 byte, bf16 rope, an fp32 scale each 128 values."""
    token_bytes = kv_lora_rank + rope_dim * 2 + -(-kv_lora_rank // 128) * 4
    component = Component("kv", dtype, (block_size, 1, token_bytes), block_size)
    return separate(layer_name, [component], Container.TENSOR)


def cache_only(
    layer_name: str, block_size: int, hidden_dim: int, *, page_stride: int | None = None, dtype: torch.dtype = BF16
) -> CacheSpec:
    """A bare tensor `(num_blocks, block_size, hidden_dim)`, padded where `page_stride` (bytes) exceeds its block."""
    component = Component("hidden", dtype, (block_size, hidden_dim), block_size)
    region = Region(page_stride or component.kernel_bytes, (View(layer_name, component),))
    return CacheSpec((Entry(layer_name, Container.TENSOR),), (RawTensor((region,)),))


def _dense(layer_name: str, component: Component) -> Region:
    return Region(component.kernel_bytes, (View(layer_name, component),))
