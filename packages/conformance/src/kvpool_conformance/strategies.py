"""Hypothesis strategies: caches and block tables of every kind."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvpool_conformance.cases import FAMILIES, CacheCase


@st.composite
def cases(draw: DrawFn, families: tuple[str, ...] = FAMILIES) -> CacheCase:
    """Small caches with any mixture of what a layout can have."""
    family = draw(st.sampled_from(families))
    num_layers = draw(st.integers(1, 4))
    kernel_blocks = draw(st.sampled_from([1, 1, 2, 4]))
    sparse = family not in ("gqa", "mla")
    # With 16, as many heads as tokens would look like the NZ order of a 310P.
    head_dim = draw(st.sampled_from([8, 32, 64]))
    # C8 lays key blocks and scales side by side in one raw tensor, which kernel blocks and holes do not go with.
    c8 = draw(st.sampled_from(["", "", "int8", "fp8"])) if sparse else ""
    return CacheCase(
        family,
        num_layers=num_layers,
        block_size=draw(st.sampled_from([4, 8, 16, 32])),
        num_blocks=draw(st.integers(2, 20)),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32", "int8"])),
        num_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([head_dim, 8, 24])),
        kv_lora_rank=draw(st.sampled_from([8, 32, 48])),
        rope_dim=draw(st.sampled_from([4, 8])),
        rope_dtype=draw(st.sampled_from(["", "", "bfloat16", "float32"])),
        index_dim=draw(st.sampled_from([8, 16])),
        c8=c8,
        layers_without_indexer=tuple(draw(st.sets(st.integers(0, num_layers - 1)))) if sparse else (),
        mtp=draw(st.booleans()),
        padding=draw(st.sampled_from([0, 0, 64, 128])),
        kernel_blocks=kernel_blocks,
        spare_blocks=draw(st.integers(0, 3)),
        one_storage=draw(st.booleans()),
        shared_layer=draw(st.booleans()),
    )


def tables(num_blocks: int) -> SearchStrategy[list[int]]:
    """Some distinct blocks, in any order."""
    return st.permutations(range(num_blocks)).flatmap(
        lambda order: st.integers(1, num_blocks).map(lambda count: list(order[:count]))
    )
