"""Caches whose layers share memory: mamba states, attention with mamba, DeepSeek V4."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvpool_simulator.device import Caches, CacheSpec, allocate, check, fill, variants
from kvpool_simulator.device.arena import START_ALIGNMENT
from kvpool_simulator.device.families import gqa
from kvpool_simulator.device.hybrids import attention_and_mamba, deepseek_v4, mamba, state_components
from kvpool_simulator.device.spec import Component, Entry, RawTensor, Region, View

STATES = state_components((3, 20), (2, 8, 4))
V4_GROUPS = {
    0: {"v4.window": [131_072]},
    1: {"v4.attn": [131_072], "v4.indexer.k_cache": [16_384, 256]},
    2: {"v4.compressor_4.state": [32_768, 32_768], "v4.indexer.compressor_4.state": [8_192, 8_192]},
    3: {"v4.compressor_128.state": [65_536, 65_536]},
}


def hybrid(kernel_blocks: int = 1) -> CacheSpec:
    return CacheSpec.join(
        attention_and_mamba(
            f"layers.{4 * i + 3}.attn",
            [f"layers.{4 * i + j}.mamba" for j in range(3)],
            16,
            2,
            32,
            STATES,
            padding=24,
            kernel_blocks=kernel_blocks,
        )
        for i in range(2)
    )


SPECS = {
    "mamba": mamba("layers.0.mamba", STATES) + mamba("layers.1.mamba", STATES),
    "mamba and attention apart": mamba("layers.0.mamba", STATES, group=1) + gqa("layers.1.attn", 16, 2, 32),
    "hybrid": hybrid(),
    "hybrid, kernel blocks": hybrid(kernel_blocks=2),
    "hybrid, padded": variants.padded(hybrid(), 8),
    "v4": deepseek_v4("a", 32, head_dim=32, index_head_dim=16) + deepseek_v4("b", 32, head_dim=32, index_head_dim=16),
    "v4 a5": deepseek_v4("a", 32, head_dim=32, index_head_dim=16, a5=True),
}


def tensors(caches: Caches, name: str) -> list[torch.Tensor]:
    entry = caches.kv_caches[name]
    return [entry] if isinstance(entry, torch.Tensor) else list(entry)


@pytest.mark.parametrize("kind", SPECS)
def test_pages_are_the_bytes_of_the_tensors(kind: str) -> None:
    caches = allocate(SPECS[kind], 4, extra_blocks=1)
    for name in caches.kv_caches:
        for index, tensor in enumerate(tensors(caches, name)):
            kernel_blocks = len(tensor) // 5
            for block_id in range(4):
                rows = tensor[block_id * kernel_blocks : (block_id + 1) * kernel_blocks]
                expected = [
                    address
                    for row in rows
                    for address in range(row.data_ptr(), row.data_ptr() + row.numel() * row.element_size())
                ]
                pages = caches.pages(name, index, block_id)
                assert [a for start, size in pages for a in range(start, start + size)] == expected


@pytest.mark.parametrize("kind", SPECS)
def test_blocks_of_all_groups_hold_their_content_side_by_side(kind: str) -> None:
    caches = allocate(SPECS[kind], 9)
    blocks = {group: [group, 8 - group] for group in caches.groups}
    for group, block_ids in blocks.items():
        for block_id in block_ids:
            snapshot = caches.snapshot()
            fill(caches, block_id, block_id, group=group)
            assert snapshot.changed_outside(caches.block_ranges([block_id], group)) == []
    for group, block_ids in blocks.items():
        for block_id in block_ids:
            assert check(caches, block_id, block_id, group=group) == []
    assert caches.check_guards() == []


def test_mamba_states() -> None:
    caches = allocate(SPECS["mamba"], 4)
    conv, ssm = tensors(caches, "layers.1.mamba")
    assert isinstance(caches.kv_caches["layers.1.mamba"], list)
    assert (tuple(conv.shape), conv.dtype) == ((4, 3, 20), torch.bfloat16)
    assert (tuple(ssm.shape), ssm.dtype) == ((4, 2, 8, 4), torch.float32)
    assert conv.is_contiguous()
    assert ssm.is_contiguous()


def test_regions_of_a_hybrid_raw_tensor() -> None:
    caches = allocate(SPECS["hybrid"], 4)
    k, v = tensors(caches, "layers.3.attn")
    (conv, ssm), (other, _) = tensors(caches, "layers.0.mamba"), tensors(caches, "layers.1.mamba")
    start = conv.data_ptr()
    assert start % START_ALIGNMENT == 0
    assert other.data_ptr() == start
    sizes = [120, 2_048, 256, 2_048]
    assert [t.data_ptr() - start for t in (conv, k, ssm, v)] == [4 * sum(sizes[:i]) for i in range(4)]
    assert k.data_ptr() % START_ALIGNMENT != 0
    assert k.untyped_storage().nbytes() == 4 * (sum(sizes) + 24) + START_ALIGNMENT
    assert len({t.untyped_storage().data_ptr() for t in (conv, k, ssm, v)}) == 1
    assert len(tensors(allocate(SPECS["hybrid, kernel blocks"], 4), "layers.3.attn")[0]) == 8


@pytest.mark.parametrize("a5", [False, True])
def test_deepseek_v4_at_full_size(a5: bool) -> None:
    spec = deepseek_v4("v4", a5=a5)
    caches = allocate(spec, 3)
    names = {group: caches.layer_names(group) for group in caches.groups}
    assert names == {group: list(pages) for group, pages in V4_GROUPS.items()}
    for pages in V4_GROUPS.values():
        for name, sizes in pages.items():
            own = [place for place in caches.places[name] if not place.alias]
            assert [place.component.kernel_bytes for place in own] == sizes
    assert [r.page_stride for raw in spec.raw_tensors for r in raw.regions] == [131_072, 16_640]
    tokens = {c.num_tokens for name in caches.kv_caches for c in caches.components(name)}
    assert tokens == {128, 8, 32}
    k, scale, *more = tensors(caches, "v4.indexer.k_cache")
    assert scale.data_ptr() - k.data_ptr() == 16_384
    assert (k.stride(0), scale.stride(0)) == (16_640, 8_320)
    assert (k.dtype, scale.dtype) == (torch.float8_e4m3fn if a5 else torch.int8, torch.float16)
    assert len(more) == a5
    for both in more:
        assert (both.data_ptr(), tuple(both.shape)) == (k.data_ptr(), (3, 128, 1, 130))
    assert spec.layer_bytes()["v4.indexer.k_cache"] == 16_640
    # Layers of different groups lie on the same bytes; all caches are lists.
    assert tensors(caches, "v4.window")[0].data_ptr() == tensors(caches, "v4.attn")[0].data_ptr()
    assert all(isinstance(entry, list) for entry in caches.kv_caches.values())


def test_the_overlapping_view_has_no_content_of_its_own() -> None:
    caches = allocate(SPECS["v4 a5"], 4)
    fill(caches, 2, "p", group=1)
    name = "a.indexer.k_cache"
    assert caches.read(name, 2, 2) == caches.read(name, 0, 2) + caches.read(name, 1, 2)
    tensors(caches, name)[2][2] = 0
    assert [m.component for m in check(caches, 2, "p", group=1)] == ["dsa_k", "dsa_k_scale"]


def test_the_hole_of_a_state_page_is_another_groups_data_not_a_guard() -> None:
    caches = allocate(SPECS["v4"], 4)
    address, size = caches.pages("a.compressor_4.state", 1, 1)[0]
    end = address + size
    snapshot = caches.snapshot()
    caches.arena.view(end, 1)[0] ^= 0xFF
    assert caches.check_guards() == []
    (damage,) = snapshot.changed_outside(caches.block_ranges([1], 2))
    assert damage.address == end


def test_padding_of_a_hybrid_is_guarded() -> None:
    caches = allocate(SPECS["hybrid"], 4)
    address, size = caches.pages("layers.3.attn", 1, 3)[0]
    caches.arena.view(address + size + 95, 1)[0] = 0
    (damage,) = caches.check_guards()
    assert damage.nearest == "95 bytes after layers.3.attn v, block 3"


def test_misuse_is_refused_in_words() -> None:
    caches = allocate(SPECS["hybrid"], 4)
    with pytest.raises(ValueError, match=r"name one of \[0, 1, 2, 3\]"):
        fill(caches, 0, "p")
    with pytest.raises(ValueError, match="name one of"):
        caches.block_ranges([0])
    with pytest.raises(ValueError, match="asked for 1"):
        caches.token_ranges("layers.0.mamba", 0, 0, 1)
    with pytest.raises(ValueError, match="do not make 3 kernel blocks"):
        hybrid(kernel_blocks=3)
    with pytest.raises(ValueError, match="multiple of 16"):
        deepseek_v4("a", 24)
    with pytest.raises(ValueError, match="a name of its own"):
        allocate(SPECS["mamba"] + SPECS["mamba"], 4)
    one = Component("k", torch.int8, (16,), 0)
    views = (View("a", one), View("a", one, 8))
    with pytest.raises(ValueError, match="a k and a k overlap in the pages of group 0"):
        allocate(CacheSpec((Entry("a"),), (RawTensor((Region(32, views),)),)), 1)
    with pytest.raises(ValueError, match=r"only one side has \['b'\]"):
        allocate(CacheSpec((Entry("a"), Entry("b")), (RawTensor((Region(32, views[:1]),)),)), 1)
    bad = Entry("c", same_as="b")
    with pytest.raises(ValueError, match="no entry with its own memory"):
        allocate(CacheSpec((Entry("a"), bad), (RawTensor((Region(32, views[:1]),)),)), 1)


def test_content_reaches_every_byte_of_a_state() -> None:
    caches = allocate(SPECS["mamba"], 2)
    before = caches.arena.memory.copy()
    fill(caches, 1, "p")
    changed = np.flatnonzero(before != caches.arena.memory)
    assert len(changed) > 0.98 * 2 * (120 + 256)
