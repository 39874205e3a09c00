"""The layouts, each with one layer of it at real size, block size 128."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvpool_simulator.device import families, hybrids, variants
from kvpool_simulator.device.spec import CacheSpec, Region, View

BLOCK_SIZE = 128
LAYER = "layers.0.attn"


@dataclass(frozen=True)
class Row:
    """One layout."""

    name: str
    """Of the picture."""
    title: str
    entry: str
    """What is registered."""
    since: str
    """The first release of vLLM-Ascend in whose wheel the code that makes it was found, of all from 0.11.0 on."""
    spec: CacheSpec
    cases: tuple[str, ...]
    """Named cases of the conformance suite that have it: each is a golden vector and goes round on every target."""
    note: str = ""
    """What to know when moving it."""

    @property
    def views(self) -> Iterator[tuple[Region, View]]:
        """Every tensor with its region."""
        return self.spec.placed()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer; where groups share memory, of a block of each group."""
        return self.spec.block_bytes

    @property
    def num_buffers(self) -> int:
        """Runs of memory that make up one block of one layer."""
        return sum(runs(region, view) for region, view in self.views if not view.alias)


def runs(region: Region, view: View) -> int:
    """Runs of memory of one block in one component: one, or one a kernel block where holes part them."""
    return region.kernel_blocks if region.page_stride != view.component.kernel_bytes else 1


_MAIN = families.mla_components(BLOCK_SIZE, 512, 64)
_INDEXER = families.indexer_components(BLOCK_SIZE, 128)
_C8 = families.indexer_components(BLOCK_SIZE, 128, c8=True)
_A5 = families.indexer_components(BLOCK_SIZE, 128, c8=True, a5=True)
_STATES = hybrids.state_components((3, 1024), (8, 64, 64))

ROWS = (
    Row(
        "gqa",
        "GQA, MHA",
        "`(k, v)`",
        "0.11.0",
        families.gqa(LAYER, BLOCK_SIZE, 8, 128),
        ("gqa", "mha", "gqa-float32", "shared-layer"),
    ),
    Row(
        "gqa-other-v-head-size",
        "GQA, V of another head size",
        "`(k, v)`",
        "0.18.0",
        families.gqa(LAYER, BLOCK_SIZE, 4, 192, v_head_dim=128),
        ("gqa-other-v-head-size",),
    ),
    Row("mla", "MLA", "`(k_nope, k_pe)`", "0.11.0", families.mla(LAYER, BLOCK_SIZE, 512, 64), ("mla", "one-storage")),
    Row(
        "mla-two-dtypes",
        "MLA, quantised latent",
        "`(k_nope, k_pe)` of two dtypes",
        "0.18.0",
        families.mla(LAYER, BLOCK_SIZE, 512, 64, dtype=torch.int8, rope_dtype=torch.bfloat16),
        ("mla-two-dtypes",),
        "The element size is each component's own.",
    ),
    Row(
        "mla-nz",
        "MLA with `enable_kv_nz`",
        "`(k_nope, k_pe)`, shapes as in ND",
        "0.11.0",
        families.mla(LAYER, BLOCK_SIZE, 512, 64, nz=True),
        ("mla-nz", "sparse-split-nz"),
        "Only the configuration tells the byte order. ND and NZ miss each other's objects.",
    ),
    Row(
        "sparse-bundled",
        "Sparse attention (DSA), indexer in the same entry",
        "`(k_nope, k_pe, dsa_k)`",
        "0.15.0rc1, to 0.23.0",
        families.sparse_bundled(LAYER, _MAIN, _INDEXER),
        ("sparse-bundled", "some-layers-without-indexer", "more-blocks-than-the-manager"),
        "A layer without an indexer has two tensors.",
    ),
    Row(
        "sparse-bundled-reserved",
        "Sparse attention, first form of its memory",
        "`(k_nope, k_pe, dsa_k)`",
        "0.12.0rc1, to 0.14.0rc1",
        families.sparse_bundled(LAYER, _MAIN, _INDEXER, reserve_half_page=True),
        ("sparse-bundled-reserved",),
        "147,456 bytes a block are reserved for `dsa_k` and 32,768 used.",
    ),
    Row(
        "sparse-bundled-c8",
        "Sparse attention, quantised indexer (C8) in the same entry",
        "`(k_nope, k_pe, dsa_k, dsa_k_scale)`",
        "0.18.0, to 0.23.0",
        families.sparse_bundled(LAYER, _MAIN, _C8),
        ("sparse-bundled-c8",),
    ),
    Row(
        "sparse-split",
        "Sparse attention, indexer in an entry of its own",
        "`….attn` → `(k_nope, k_pe)`, `….indexer.k_cache` → `(dsa_k,)`",
        "0.24.0rc1",
        families.sparse_split(LAYER, _MAIN, _INDEXER),
        ("sparse-split", "mtp", "some-layers-without-indexer-split"),
        "Its objects are those of the bundled form. An MTP layer always has an indexer.",
    ),
    Row(
        "replicated-indexer",
        "Sparse attention under decode context parallelism, indexer copied (here twice)",
        "`….attn` → `(k_nope, k_pe)`, `….indexer.k_cache` → `(dsa_k,)`",
        "0.24.0rc1",
        families.sparse_split(LAYER, _MAIN, _INDEXER, copies=2),
        ("replicated-indexer", "replicated-indexer-c8"),
        "A block has all copies: consecutive pages of the indexer.",
    ),
    Row(
        "sparse-split-c8",
        "Sparse attention, C8 indexer in an entry of its own",
        "`….attn` → `(k_nope, k_pe)`, `….indexer.k_cache` → `(dsa_k, dsa_k_scale)`",
        "0.24.0rc1",
        families.sparse_split(LAYER, _MAIN, _C8),
        ("sparse-split-c8",),
        "Key blocks and scales are in one raw tensor, one region behind the other.",
    ),
    Row(
        "sparse-split-c8-fp8",
        "Sparse attention, C8 indexer on A5",
        "`….attn` → `(k_nope, k_pe)`, `….indexer.k_cache` → `(dsa_k, dsa_k_scale)`",
        "0.24.0rc1",
        families.sparse_split(LAYER, _MAIN, _A5),
        ("sparse-split-c8-fp8",),
        "fp8 e4m3 keys, fp32 scales.",
    ),
    Row(
        "packed-main",
        "Sparse attention, packed main cache and C8 indexer",
        "`….attn` → one tensor, `….indexer.k_cache` → `(dsa_k, dsa_k_scale)`",
        "0.24.0rc1",
        families.packed_main(LAYER, BLOCK_SIZE) + families.indexer_cache(LAYER, _C8),
        ("packed-main-c8", "packed-main-c8-fp8", "packed-main-656", "packed-main-fp8"),
        "A token has 512 bytes of latent, 128 of bf16 rope and 16 of fp32 scales.",
    ),
    Row(
        "cache-only",
        "Cache-only layer",
        "one tensor",
        "0.20.2rc1",
        families.cache_only(LAYER, BLOCK_SIZE, 512),
        ("cache-only",),
    ),
    Row(
        "cache-only-padded",
        "Cache-only layer, padded pages",
        "one strided tensor",
        "0.22.1rc1",
        families.cache_only(LAYER, BLOCK_SIZE, 512, page_stride=147_456),
        ("cache-only-padded", "padded-block-stride"),
        "Block stride and block bytes are two numbers; the hole is neither read nor written.",
    ),
    Row(
        "kernel-blocks",
        "Kernel blocks smaller than the manager's (here four)",
        "any, here `(k, v)`, with 4 x NB pages",
        "0.11.0",
        variants.in_kernel_blocks(families.gqa(LAYER, BLOCK_SIZE, 8, 128), 4),
        ("kernel-blocks",),
        "Consecutive pages of the tensor are one block.",
    ),
    Row(
        "padded-kernel-blocks",
        "Kernel blocks in padded pages",
        "any, here split sparse attention, with 2 x NB strided pages",
        "—",
        variants.padded(variants.in_kernel_blocks(families.sparse_split(LAYER, _MAIN, _INDEXER), 2), 4096),
        ("padded-kernel-blocks",),
        "One buffer a kernel block.",
    ),
    Row(
        "mamba",
        "Mamba states",
        "list `[conv, ssm]`",
        "0.11.0",
        hybrids.mamba("layers.0.mamba", _STATES),
        ("mamba-states",),
        "A state counts no tokens: a block is whole or not there. Shapes are the model's; these are examples.",
    ),
    Row(
        "attention-and-mamba",
        "Attention with mamba in one raw tensor",
        "attention `(k, v)`, mamba lists `[conv, ssm]`",
        "0.16.0rc1",
        hybrids.attention_and_mamba("layers.3.attn", ["layers.0.mamba"], BLOCK_SIZE, 2, 128, _STATES, padding=2048),
        ("attention-and-mamba", "attention-and-mamba-kernel-blocks"),
        "Regions run over all blocks, so K starts off the 2 MiB grid. Layers of other groups lie on the same bytes.",
    ),
    Row(
        "deepseek-v4",
        "DeepSeek V4",
        "lists of strided views, six entries in four groups",
        "0.20.2rc1",
        hybrids.deepseek_v4("layers.0"),
        ("deepseek-v4",),
        "Every group's pages lie in the same two raw tensors, of 131,072 and 16,640 bytes a page; the indexer's keys "
        "and scales are interleaved page by page. Which entries share a page, and the states' shapes, are assumed.",
    ),
    Row(
        "deepseek-v4-a5",
        "DeepSeek V4 on A5",
        "as above; the indexer has a third view",
        "0.21.0rc1",
        hybrids.deepseek_v4("layers.0", a5=True),
        ("deepseek-v4-a5",),
        "The third view covers the first two: its bytes are moved once, as theirs.",
    ),
    Row(
        "gqa-310p",
        "GQA on 310P",
        "`(k, v)`",
        "0.11.0, not in 0.12 and 0.13",
        families.gqa_310p(LAYER, BLOCK_SIZE, 8, 128),
        ("gqa-310p-nz",),
        'FRACTAL_NZ (format 29), not on the 2 MiB grid. Needs `cache_order` = `"NZ"`.',
    ),
)
