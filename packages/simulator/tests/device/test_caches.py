"""Pages lie where torch says that they lie, for every kind of cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_simulator.device import Caches, CacheSpec, allocate, check, families, fill, rank_spec, variants
from kvpool_simulator.device.arena import GUARD_BYTES, POISON, START_ALIGNMENT
from kvpool_simulator.device.spec import Component, Order

LAYER = "model.layers.0.self_attn.attn"
MAIN = families.mla_components(16, 32, 8)


def indexer(c8: bool = False, a5: bool = False) -> list[Component]:
    return families.indexer_components(16, 16, c8=c8, a5=a5)


def two_layers(make: Callable[..., CacheSpec], *args: Any, **options: Any) -> CacheSpec:
    return CacheSpec.join(make(f"model.layers.{i}.self_attn.attn", *args, **options) for i in range(2))


SPECS: dict[str, CacheSpec] = {
    "gqa": two_layers(families.gqa, 16, 2, 64),
    "gqa, other v": two_layers(families.gqa, 16, 2, 64, v_head_dim=32),
    "gqa, heads first": two_layers(families.gqa, 16, 2, 64, heads_first=True),
    "mla": two_layers(families.mla, 16, 32, 8),
    "mla, two dtypes": two_layers(families.mla, 16, 32, 8, dtype=torch.int8, rope_dtype=torch.bfloat16),
    "mla, nz": two_layers(families.mla, 16, 32, 16, nz=True),
    "sparse bundled": two_layers(families.sparse_bundled, MAIN, indexer()),
    "sparse reserved": two_layers(families.sparse_bundled, MAIN, indexer(), reserve_half_page=True),
    "sparse split": two_layers(families.sparse_split, MAIN, indexer()),
    "sparse split, copies": two_layers(families.sparse_split, MAIN, indexer(), copies=2),
    "c8 bundled": two_layers(families.sparse_bundled, MAIN, indexer(c8=True)),
    "c8 split": two_layers(families.sparse_split, MAIN, indexer(c8=True)),
    "c8 split, copies": two_layers(families.sparse_split, MAIN, indexer(c8=True), copies=2),
    "c8 a5": two_layers(families.sparse_split, MAIN, indexer(c8=True, a5=True)),
    "packed": two_layers(families.packed_main, 16),
    "cache only": two_layers(families.cache_only, 16, 24),
    "cache only, padded": two_layers(families.cache_only, 16, 24, page_stride=1_024),
    "310p": two_layers(families.gqa_310p, 16, 2, 32),
    "padded": variants.padded(two_layers(families.sparse_split, MAIN, indexer()), 64),
    "kernel blocks": variants.in_kernel_blocks(two_layers(families.gqa, 16, 2, 64), 4),
    "kernel blocks, holes": variants.padded(variants.in_kernel_blocks(two_layers(families.mla, 16, 32, 8), 2), 48),
    "one storage": variants.in_one_storage(two_layers(families.gqa, 16, 2, 64)),
    "shared": variants.sharing(two_layers(families.gqa, 16, 2, 64), "model.layers.9.self_attn.attn", LAYER),
    "no indexer on some": rank_spec("tiny-glm-5.2", sparse="bundled", mtp=True),
}


def tensors(caches: Caches, name: str) -> list[torch.Tensor]:
    entry = caches.kv_caches[name]
    return [entry] if isinstance(entry, torch.Tensor) else list(entry)


def expand(ranges: list[tuple[int, int]]) -> list[int]:
    return [address for start, size in ranges for address in range(start, start + size)]


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(("extra", "kv_transfer"), [(0, True), (3, False)])
def test_pages_are_the_bytes_of_the_tensors(kind: str, extra: int, kv_transfer: bool) -> None:
    caches = allocate(SPECS[kind], 5, extra_blocks=extra, kv_transfer=kv_transfer)
    for name in caches.kv_caches:
        for index, tensor in enumerate(tensors(caches, name)):
            kernel_blocks, rest = divmod(len(tensor), 5 + extra)
            assert rest == 0
            size = tensor[0].numel() * tensor.element_size()
            assert tensor[0].is_contiguous()
            for block_id in range(5):
                expected = [
                    address
                    for i in range(block_id * kernel_blocks, (block_id + 1) * kernel_blocks)
                    for address in range(tensor[i].data_ptr(), tensor[i].data_ptr() + size)
                ]
                assert expand(caches.pages(name, index, block_id)) == expected


@pytest.mark.parametrize("kind", SPECS)
def test_blocks_hold_their_content_and_nothing_else_moves(kind: str) -> None:
    caches = allocate(SPECS[kind], 6, extra_blocks=1)
    assert caches.check_guards() == []
    for block_id in (0, 2, 5):
        fill(caches, block_id, f"prefix {block_id}")
    snapshot = caches.snapshot()
    fill(caches, 3, b"other")
    assert snapshot.changed_outside(caches.block_ranges([3])) == []
    assert snapshot.changed_outside(caches.block_ranges([4]))
    for block_id in (0, 2, 5):
        assert check(caches, block_id, f"prefix {block_id}") == []
        assert check(caches, block_id, "another")
    assert caches.check_guards() == []
    caches.poison_blocks([2])
    owned = [len(caches.components(name)) for name in caches.layer_names()]
    mismatches = check(caches, 2, "prefix 2")
    assert len(mismatches) == sum(owned)
    assert all(m.num_wrong == m.num_poison > 0.9 * m.page_bytes for m in mismatches)
    assert check(caches, 3, b"other") == []


@pytest.mark.parametrize("kind", SPECS)
def test_starts(kind: str) -> None:
    for kv_transfer in (True, False):
        caches = allocate(SPECS[kind], 3, kv_transfer=kv_transfer)
        for raw in caches.spec.raw_tensors:
            first = raw.regions[0].views[0]
            index = [c.name for c in caches.components(first.layer_name)].index(first.component.name)
            start = tensors(caches, first.layer_name)[index].data_ptr()
            if kv_transfer and raw.aligned:
                assert start % START_ALIGNMENT == 0
            elif raw.storage is None:
                assert start % START_ALIGNMENT != 0


def test_what_is_registered() -> None:
    def kinds(kind: str) -> list[tuple[type, list[tuple[torch.Size, torch.dtype]]]]:
        caches = allocate(SPECS[kind], 5)
        return [
            (type(entry), [(t.shape[1:], t.dtype) for t in tensors(caches, name)])
            for name, entry in caches.kv_caches.items()
        ]

    bf16, int8 = torch.bfloat16, torch.int8
    assert kinds("gqa, other v")[0] == (tuple, [((16, 2, 64), bf16), ((16, 2, 32), bf16)])
    assert kinds("mla, two dtypes")[0] == (tuple, [((16, 1, 32), int8), ((16, 1, 8), bf16)])
    assert kinds("c8 bundled")[0] == (
        tuple,
        [((16, 1, 32), bf16), ((16, 1, 8), bf16), ((16, 1, 16), int8), ((16, 1, 1), torch.float16)],
    )
    assert kinds("c8 split")[1] == (tuple, [((16, 1, 16), int8), ((16, 1, 1), torch.float16)])
    assert kinds("packed")[0] == (torch.Tensor, [((16, 1, 656), int8)])
    assert kinds("310p")[0] == (tuple, [((4, 16, 16), torch.float16)] * 2)
    assert kinds("cache only, padded")[0] == (torch.Tensor, [((16, 24), bf16)])


def test_split_c8_is_one_raw_tensor() -> None:
    caches = allocate(SPECS["c8 split"], 5)
    k, scale = tensors(caches, "model.layers.0.self_attn.indexer.k_cache")
    assert k.untyped_storage().data_ptr() == scale.untyped_storage().data_ptr()
    assert scale.data_ptr() - k.data_ptr() == -(-5 * 256 // 512) * 512
    bundled = tensors(allocate(SPECS["c8 bundled"], 5), LAYER)
    assert len({t.untyped_storage().data_ptr() for t in bundled}) == 4


def test_strides_and_counts() -> None:
    padded = tensors(allocate(SPECS["cache only, padded"], 5), LAYER)[0]
    assert padded.stride(0) * 2 == 1_024 > 16 * 24 * 2
    copies = allocate(SPECS["sparse split, copies"], 5, extra_blocks=2)
    assert len(tensors(copies, "model.layers.0.self_attn.indexer.k_cache")[0]) == 14
    kernel = allocate(SPECS["kernel blocks, holes"], 5)
    assert tuple(tensors(kernel, LAYER)[0].shape) == (10, 8, 1, 32)
    start = tensors(kernel, LAYER)[0].data_ptr()
    assert kernel.pages(LAYER, 0, 1) == [(start + 2 * 560, 512), (start + 3 * 560, 512)]


def test_storages() -> None:
    one = allocate(SPECS["one storage"], 5)
    assert len({t.untyped_storage().data_ptr() for n in one.kv_caches for t in tensors(one, n)}) == 1
    separate = allocate(SPECS["gqa"], 5)
    assert len({t.untyped_storage().data_ptr() for n in separate.kv_caches for t in tensors(separate, n)}) == 4
    shared = allocate(SPECS["shared"], 5)
    assert shared.kv_caches["model.layers.9.self_attn.attn"] is shared.kv_caches[LAYER]
    assert "model.layers.9.self_attn.attn" not in shared.layer_names()


@pytest.mark.parametrize("kind", ["gqa", "one storage", "310p"])
@pytest.mark.parametrize("kv_transfer", [True, False])
def test_guards_lie_on_both_sides_of_every_tensor(kind: str, kv_transfer: bool) -> None:
    caches = allocate(SPECS[kind], 4, kv_transfer=kv_transfer)
    starts, ends = caches.arena.pages()
    assert len(starts) == 4
    assert starts[0] >= GUARD_BYTES
    assert (starts[1:] - ends[:-1] >= GUARD_BYTES).all()
    assert caches.arena.num_bytes - ends[-1] >= GUARD_BYTES


def test_extra_blocks_are_guards() -> None:
    caches = allocate(SPECS["gqa"], 5, extra_blocks=2)
    tensors(caches, LAYER)[1][5, 3, 1, 2] = 1.0
    (damage,) = caches.check_guards()
    assert damage.nearest.endswith(f"bytes after {LAYER} v, block 4")


@pytest.mark.parametrize(
    "kind", ["gqa", "gqa, heads first", "310p", "mla, nz", "kernel blocks, holes", "c8 split, copies"]
)
def test_token_ranges_against_the_meaning_of_the_order(kind: str) -> None:
    """Mark the first n tokens through the tensor as the order reads it; exactly the token ranges change."""
    for num_tokens in (0, 1, 7, 16):
        caches = allocate(SPECS[kind], 3)
        for name in caches.layer_names():
            for index, component in enumerate(caches.components(name)):
                caches.poison(0)
                left = num_tokens
                rows = tensors(caches, name)[index].view(torch.uint8)
                per_block = len(rows) // 3
                for row in rows[per_block : 2 * per_block]:
                    here = min(left, component.num_tokens)
                    # NZ of either kind: (columns / 16, tokens, 16); a shape that says otherwise is not to be believed.
                    if component.order is Order.NZ:
                        row.view(-1, component.num_tokens, 16 * component.dtype.itemsize)[:, :here] = 1
                    elif component.heads_first:
                        row[:, :here] = 1
                    else:
                        row[:here] = 1
                    left -= here
                marked = np.flatnonzero(caches.arena.memory == 1) + caches.arena.address
                assert expand(sorted(caches.token_ranges(name, index, 1, num_tokens))) == marked.tolist()


def test_ranks_hold_the_same_bytes_of_the_same_head() -> None:
    """A page at TP 1 is the pages of the ranks at TP 2 side by side; at TP 4 two ranks hold the same."""
    whole = allocate(rank_spec("tiny-qwen3-32b"), 2)
    fill(whole, 1, "prefix")
    heads = np.frombuffer(whole.read(LAYER, 0, 1), np.uint8).reshape(16, 2, 128)
    for tp in (2, 4):
        for rank in range(tp):
            part = allocate(rank_spec("tiny-qwen3-32b", tp=tp, tp_rank=rank), 2)
            fill(part, 0, "prefix")
            assert part.read(LAYER, 0, 0) == heads[:, rank * 2 // tp].tobytes()


def test_the_order_of_heads_and_tokens_decides_the_bytes() -> None:
    tokens_first, heads_first = allocate(SPECS["gqa"], 1), allocate(SPECS["gqa, heads first"], 1)
    for caches in (tokens_first, heads_first):
        fill(caches, 0, "prefix")
    one = np.frombuffer(tokens_first.read(LAYER, 1, 0), np.uint8).reshape(16, 2, 128)
    other = np.frombuffer(heads_first.read(LAYER, 1, 0), np.uint8).reshape(2, 16, 128)
    assert (one == other.swapaxes(0, 1)).all()


def test_content_does_not_depend_on_kernel_blocks() -> None:
    plain, cut = allocate(SPECS["gqa"], 2), allocate(SPECS["kernel blocks"], 2)
    fill(plain, 1, 5)
    fill(cut, 1, 5)
    assert plain.read(LAYER, 1, 1) == cut.read(LAYER, 1, 1)


@settings(max_examples=25)
@given(st.binary(max_size=40), st.binary(max_size=40), st.sampled_from(["gqa", "c8 split", "310p"]))
def test_content_differs_by_prefix_layer_component_and_part(one: bytes, other: bytes, kind: str) -> None:
    caches = allocate(SPECS[kind], 2)
    fill(caches, 0, one)
    fill(caches, 1, other)
    assert (check(caches, 1, one) == []) == (one == other)
    assert check(caches, 0, one, part="cp 1/2")
    pages = [caches.read(n, i, 0) for n in caches.layer_names() for i in range(len(caches.components(n)))]
    assert len({page[:16] for page in pages}) == len(pages)


def test_mismatch_says_where() -> None:
    caches = allocate(SPECS["c8 split"], 4)
    fill(caches, 2, "p")
    address, _ = caches.pages("model.layers.1.self_attn.indexer.k_cache", 1, 2)[0]
    caches.arena.view(address + 5, 1)[0] ^= 0xFF
    (mismatch,) = check(caches, 2, "p")
    assert str(mismatch) == (
        "model.layers.1.self_attn.indexer.k_cache dsa_k_scale (component 1), block 2: "
        "1 of 32 bytes wrong from byte 5, 0 poison"
    )
    assert check(caches, 2, "p", layer_names=["model.layers.0.self_attn.attn"]) == []


def test_full_size_is_quick_enough_to_use() -> None:
    caches = allocate(rank_spec("deepseek-v3.2", sparse="bundled"), 8)
    fill(caches, 3, "prefix")
    assert check(caches, 3, "prefix") == []
    assert len(caches.block_ranges([3])) == 183
    assert caches.check_guards() == []


def test_misuse_is_refused_in_words() -> None:
    caches = allocate(SPECS["gqa"], 2)
    with pytest.raises(ValueError, match="block 2 does not exist: 2 blocks"):
        caches.pages(LAYER, 0, 2)
    with pytest.raises(ValueError, match="4096 bytes a block, found 3"):
        caches.write(LAYER, 0, 0, b"abc")
    with pytest.raises(ValueError, match="holds 16 tokens a block, asked for 17"):
        caches.token_ranges(LAYER, 0, 0, 17)
    with pytest.raises(ValueError, match="at least 1 block"):
        allocate(SPECS["gqa"], 0)
    with pytest.raises(ValueError, match="make the page stride larger"):
        families.cache_only("x", 16, 24, page_stride=700)
    with pytest.raises(ValueError, match="no entry is called 'y'"):
        variants.sharing(SPECS["gqa"], "z", "y")
    with pytest.raises(ValueError, match="16 tokens do not make 3 blocks"):
        variants.in_kernel_blocks(SPECS["gqa"], 3)
    with pytest.raises(ValueError, match="only token-major"):
        variants.in_kernel_blocks(SPECS["310p"], 2)
    assert POISON in caches.read(LAYER, 0, 0)
