"""The caches of named models; `tests/layouts/test_numbers.py` has the published numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpool_simulator.device import allocate, rank_spec
from kvpool_simulator.device.models import MODELS, Gqa, head_range, stage_layers
from kvpool_simulator.device.spec import CacheSpec

C8: dict[str, Any] = {"c8": True}
A5: dict[str, Any] = {"c8": True, "a5": True}


def sizes_of_layer(spec: CacheSpec, layer: str) -> list[int]:
    return [
        view.component.kernel_bytes * region.kernel_blocks
        for region, view in spec.placed()
        if f".{layer}." in f".{view.layer_name}"
    ]


@pytest.mark.parametrize("options", [{}, C8, A5])
@pytest.mark.parametrize("form", ["bundled", "reserved"])
def test_both_sparse_forms_hold_the_same_bytes(options: dict[str, Any], form: str) -> None:
    split, bundled = rank_spec("deepseek-v3.2", **options), rank_spec("deepseek-v3.2", sparse=form, **options)
    assert split.block_bytes == bundled.block_bytes
    assert split.num_buffers == bundled.num_buffers
    assert len(split.entries) == 2 * len(bundled.entries) == 122


def test_first_form_reserves_half_the_page() -> None:
    spec = rank_spec("deepseek-v3.2", sparse="reserved")
    raw = spec.raw_tensors[2]
    assert sum(region.page_stride for region in raw.regions) == 147_456
    assert sum(view.component.kernel_bytes for region in raw.regions for view in region.views) == 32_768


@pytest.mark.parametrize(
    ("name", "options", "components"),
    [
        ("tiny-qwen3-32b", {}, [4_096, 4_096]),
        ("tiny-qwen3-235b", {}, [4_096, 4_096]),
        ("tiny-deepseek-v3", {}, [1_024, 256]),
        ("tiny-deepseek-v3.2", {}, [1_024, 256, 512]),
        ("tiny-deepseek-v3.2", C8, [1_024, 256, 256, 32]),
    ],
)
def test_tiny_numbers(name: str, options: dict[str, Any], components: list[int]) -> None:
    assert sizes_of_layer(rank_spec(name, **options), "layers.1") == components


@pytest.mark.parametrize(
    ("form", "entries", "tensors"), [("split", 2, (2, 1)), ("bundled", 1, (3,)), ("reserved", 1, (3,))]
)
def test_entries_of_a_sparse_layer(form: str, entries: int, tensors: tuple[int, ...]) -> None:
    caches = allocate(rank_spec("tiny-deepseek-v3.2", sparse=form, pp=3, pp_rank=2), 3).kv_caches
    names = ["model.layers.2.self_attn.attn", "model.layers.2.self_attn.indexer.k_cache"][:entries]
    assert list(caches) == names
    assert all(isinstance(entry, tuple) for entry in caches.values())
    assert tuple(len(entry) for entry in caches.values()) == tensors
    main = caches[names[0]]
    assert [tuple(t.shape) for t in main[:2]] == [(3, 16, 1, 32), (3, 16, 1, 8)]
    assert tuple(caches[names[-1]][-1].shape) == (3, 16, 1, 16)


def test_packed_main_is_one_tensor_of_656_bytes_a_token() -> None:
    name = "model.layers.0.self_attn.attn"
    tensor = allocate(rank_spec("deepseek-v3.2", packed=True, c8=True, pp=61), 2).kv_caches[name]
    assert isinstance(tensor, torch.Tensor)
    assert (tuple(tensor.shape), tensor.dtype) == ((2, 128, 1, 656), torch.int8)


def test_a5_dtypes() -> None:
    caches = allocate(rank_spec("tiny-deepseek-v3.2", **A5), 2).kv_caches
    k, scale = caches["model.layers.0.self_attn.indexer.k_cache"]
    assert (k.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)


def test_layers_without_an_indexer() -> None:
    spec = rank_spec("glm-5.2", mtp=True)
    indexers = [entry.layer_name for entry in spec.entries if entry.layer_name.endswith(".indexer.k_cache")]
    assert len(indexers) == 21 + 1
    assert indexers[-1] == "mtp.layers.0.self_attn.indexer.k_cache"
    bundled = allocate(rank_spec("tiny-glm-5.2", sparse="bundled", mtp=True), 2).kv_caches
    assert [len(entry) for entry in bundled.values()] == [3, 2, 2, 2, 3, 2, 3]


def test_mtp_names() -> None:
    last = [rank_spec("deepseek-v3", mtp=True, mtp_prefix=p).entries[-1].layer_name for p in ("mtp", "model.layers")]
    assert last == ["mtp.0.self_attn.attn", "model.layers.61.self_attn.attn"]


def test_stages_partition_the_layers_and_mtp_is_on_the_last() -> None:
    whole = rank_spec("deepseek-v3.2", mtp=True)
    for pp in (1, 2, 3, 4):
        stages = [rank_spec("deepseek-v3.2", mtp=True, pp=pp, pp_rank=i) for i in range(pp)]
        assert CacheSpec.join(stages) == whole
    assert [len(stage_layers(61, 2, i, (30, 31))) for i in range(2)] == [30, 31]
    assert [len(stage_layers(61, 4, i)) for i in range(4)] == [15, 15, 16, 15]


def test_ranks_hold_heads() -> None:
    assert [head_range(8, 4, r) for r in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert [head_range(2, 4, r) for r in range(4)] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert [view.component.first_head for _, view in rank_spec("qwen3-32b", tp=16, tp_rank=15).placed()] == [7] * 128


def test_v_may_have_another_head_size() -> None:
    model = replace(MODELS["tiny-qwen3-32b"], attention=Gqa(2, 64, 32))
    assert sizes_of_layer(rank_spec(model), "layers.0") == [4_096, 2_048]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen3-8b", {}, "have deepseek-v3"),
        ("qwen3-32b", {"tp": 3}, "tp 3 and 8 KV heads"),
        ("qwen3-32b", {"tp": 2, "tp_rank": 2}, "tp_rank must be in 0..1"),
        ("qwen3-32b", {"mtp": True}, "no MTP layers"),
        ("deepseek-v3", {"c8": True}, "no sparse attention"),
        ("deepseek-v3.2", {"sparse": "both"}, "found 'both'"),
        ("deepseek-v3.2", {"a5": True}, "set c8 too"),
        ("deepseek-v3.2", {"packed": True, "sparse": "bundled"}, "came with sparse='split'"),
        ("deepseek-v3.2", {"pp": 2, "pp_partition": (30, 30)}, "sum to 61"),
    ],
)
def test_misuse_is_refused_in_words(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rank_spec(name, **options)
