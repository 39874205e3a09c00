"""Layouts from tensors: what is read, and what is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpool_connector.contract.errors import LayoutError
from kvpool_connector.contract.layout import REGION_ALIGNMENT, Region, ShardLayout
from kvpool_connector.planner import Planner
from kvpool_connector.registration import GroupSpec, merged, read_layouts

BF16 = torch.bfloat16
NAME = "model.layers.0.self_attn.attn"


def read(caches: dict[str, Any], **group: Any) -> ShardLayout:
    """The one layout of caches in one group; 16 tokens a block, 4 blocks."""
    spec = GroupSpec(tuple(caches), **{"block_size": 16, "num_blocks": 4, **group})
    (layout,) = read_layouts(caches, [spec])
    return layout


def bytes_of(layout: ShardLayout, block_id: int) -> list[tuple[int, int]]:
    return [piece for component in layout.components for piece in component.pieces(block_id)]


def test_components_keep_their_own_element_size_and_base() -> None:
    entry = (
        torch.zeros(4, 16, 1, 32, dtype=BF16),
        torch.zeros(4, 16, 1, 8, dtype=BF16),
        torch.zeros(4, 16, 1, 16, dtype=torch.int8),
        torch.zeros(4, 16, 1, 1, dtype=torch.float16),
    )
    layout = read({NAME: entry}, kind="latent")
    assert [c.name for c in layout.components] == ["k_nope", "k_pe", "dsa_k", "dsa_k_scale"]
    assert [c.page_bytes for c in layout.components] == [1024, 256, 256, 32]
    assert bytes_of(layout, 3) == [(t[3].data_ptr(), t[3].numel() * t.element_size()) for t in entry]
    assert layout.object_bytes == 1568
    planner = Planner(layout)
    assert planner.addresses([3, 0]) == [tuple(t[b].data_ptr() for t in entry) for b in (3, 0)]
    assert planner.sizes == [1024, 256, 256, 32]


def test_v_may_have_another_head_size() -> None:
    layout = read({NAME: (torch.zeros(4, 16, 2, 64), torch.zeros(4, 16, 2, 32))})
    assert [c.page_bytes for c in layout.components] == [8192, 4096]


def test_layers_are_ordered_by_index_and_mtp_comes_last() -> None:
    names = ["model.layers.10.attn", "model.layers.2.attn", "model.mtp.0.attn", "mtp.layers.1.attn", "encoder"]
    layout = read({name: torch.zeros(4, 16, 1, 8) for name in names})
    assert [layer.label for layer in layout.layers] == ["2", "10", "mtp.0", "mtp.1", "encoder"]


def test_a30_bundled_and_split_indexers_make_the_same_layers() -> None:
    def tensors() -> list[torch.Tensor]:
        return [torch.zeros(4, 16, 1, d, dtype=BF16) for d in (32, 8, 16)]

    k_nope, k_pe, dsa_k = tensors()
    bundled = read({NAME: tuple(tensors())}, kind="latent")
    split = read({"model.layers.0.self_attn.indexer.k_cache": (dsa_k,), NAME: (k_nope, k_pe)}, kind="latent")
    shapes = [[(c.name, c.page_shape, c.dtype) for c in layout.components] for layout in (bundled, split)]
    assert shapes[0] == shapes[1]
    assert [layer.label for layer in split.layers] == ["0"]


def test_a_layer_that_shares_tensors_is_moved_once() -> None:
    entry = (torch.zeros(4, 16, 1, 8), torch.zeros(4, 16, 1, 8))
    layout = read({NAME: entry, "model.layers.5.self_attn.attn": entry})
    assert layout.num_pieces == 2
    assert layout.layers[0].layer_names == (NAME, "model.layers.5.self_attn.attn")


def test_one_storage_is_one_region() -> None:
    raw = torch.zeros(2 * 4 * 16 * 8)
    views = {f"layers.{i}.attn": raw[i * 512 : (i + 1) * 512].view(4, 16, 1, 8) for i in range(2)}
    layout = read(views)
    (region,) = layout.regions
    assert (region.address, region.num_bytes) == (raw.data_ptr(), raw.numel() * 4)


def test_a_region_starts_on_two_mib_where_its_storage_reaches_so_far_back() -> None:
    """A hybrid's first attention page lies somewhere inside a raw tensor that starts on 2 MiB."""
    raw = torch.zeros(5 << 20, dtype=torch.uint8)
    aligned = -raw.data_ptr() % REGION_ALIGNMENT
    for offset, start in ((aligned + 4096, aligned), (aligned, aligned), (512, 512 if aligned > 512 else aligned)):
        page = raw[offset : offset + 2048].view(4, 16, 1, 32)
        (region,) = read({NAME: page}).regions
        assert region.address == raw.data_ptr() + start
        assert region.address + region.num_bytes == page.data_ptr() + 2048


def test_a34_padded_stride_and_kernel_blocks() -> None:
    raw = torch.zeros(8 * 100, dtype=torch.uint8)
    padded = raw.as_strided((8, 8, 1, 8), (100, 8, 8, 1))
    layout = read({NAME: padded})
    assert bytes_of(layout, 1) == [(raw.data_ptr() + 200, 64), (raw.data_ptr() + 300, 64)]
    dense = torch.zeros(8, 8, 1, 8, dtype=torch.uint8)
    assert bytes_of(read({NAME: dense}), 1) == [(dense.data_ptr() + 128, 128)]


def test_kernel_blocks_with_heads_first_are_another_order() -> None:
    whole, halves = torch.zeros(4, 2, 16, 8), torch.zeros(8, 2, 8, 8)
    shapes = [read({NAME: tensor}, order="HND").components[0].page_shape for tensor in (whole, halves)]
    assert shapes == [(2, 16, 8), (2, 2, 8, 8)]


def test_more_blocks_than_the_manager_has_are_fine() -> None:
    assert read({NAME: torch.zeros(9, 16, 1, 8)}).num_blocks == 4


def test_a15_the_order_is_the_specs_not_the_shapes() -> None:
    tensor = torch.zeros(4, 2, 2, 8)
    orders = [read({NAME: tensor}, order=order, block_size=2).components[0].order for order in ("NHD", "HND")]
    assert orders == ["NHD", "HND"]
    permuted = torch.zeros(4, 3, 16, 8).permute(0, 2, 1, 3)
    component = read({NAME: permuted}).components[0]
    assert (component.order, component.page_shape) == ("HND", (3, 16, 8))


def overlapping() -> dict[str, Any]:
    raw = torch.zeros(1024)
    return {"layers.0.a": raw[:512].view(4, 16, 1, 8), "layers.1.a": raw[256:768].view(4, 16, 1, 8)}


INDEXER = "model.layers.0.self_attn.indexer.k_cache"


def copied(num_blocks: int) -> dict[str, Any]:
    """An attention of four blocks and an indexer of another number."""
    return {NAME: torch.zeros(4, 16, 1, 8), INDEXER: (torch.zeros(num_blocks, 16, 1, 8),)}


def test_copies_of_an_indexer_are_pages_of_one_block() -> None:
    caches = copied(8)
    layout = read(caches, context_size=2)
    assert bytes_of(layout, 3)[1] == (caches[INDEXER][0][6].data_ptr(), 2 * 16 * 8 * 4)
    assert layout.components[1].page_shape == (32, 1, 8)
    # Without context parallelism the blocks behind the manager's are spare ones.
    assert bytes_of(read(caches), 3)[1] == (caches[INDEXER][0][3].data_ptr(), 16 * 8 * 4)


def test_a_view_that_covers_the_others_is_moved_once() -> None:
    raw = torch.zeros(4 * 144, dtype=torch.uint8)
    k, scale = raw.as_strided((4, 16, 1, 8), (144, 8, 8, 1)), raw.as_strided((4, 16, 1, 1), (144, 1, 1, 1), 128)
    both = raw.as_strided((4, 16, 1, 9), (144, 9, 9, 1))
    for entry in ([k, scale, both], [both, k, scale]):
        layout = read({INDEXER: entry})
        assert bytes_of(layout, 1) == [(raw.data_ptr() + 144, 128), (raw.data_ptr() + 272, 16)]
    with pytest.raises(LayoutError, match="overlap"):
        read({INDEXER: [k, scale, raw.as_strided((4, 16, 1, 8), (144, 8, 8, 1), 8)]})


def test_regions_that_share_bytes_are_one() -> None:
    regions = [Region(100, 50), Region(0, 10), Region(120, 10), Region(140, 20), Region(160, 5)]
    assert merged(regions) == [Region(0, 10), Region(100, 60), Region(160, 5)]


@pytest.mark.parametrize(
    ("caches", "group", "words"),
    [
        (overlapping(), {}, ["layers.0.a", "layers.1.a", "overlap", "expected disjoint pages"]),
        ({NAME: (torch.zeros(8, 16, 1, 8), torch.zeros(6, 16, 1, 8))}, {}, [NAME, "unequal", "8", "6"]),
        ({NAME: torch.zeros(3, 16, 1, 8)}, {}, [NAME, "that is 3 blocks", "at least 4"]),
        ({NAME: torch.zeros(4, 16, 2, 8)[:, :, :, :4]}, {}, [NAME, "not dense", "strides"]),
        ({NAME: torch.zeros(4, 16, 1, 8).expand(4, 16, 1, 8)[:1].expand(4, 16, 1, 8)}, {}, [NAME, "blocks overlap"]),
        ({NAME: torch.zeros(0, 16, 1, 8)}, {}, [NAME, "at least one block"]),
        ({NAME: torch.zeros(4)}, {}, [NAME, "(num_blocks, *page)"]),
        ({NAME: torch.zeros(4, 5, 1, 8)}, {}, [NAME, "5 tokens", "divisor of the block size 16"]),
        ({NAME: None}, {}, [NAME, "NoneType", "expected a tensor"]),
        ({NAME: {"k": torch.zeros(4, 16, 1, 8)}}, {}, [NAME, "dict", "expected a tensor"]),
        ({NAME: ()}, {}, [NAME, "expected a tensor"]),
        ({NAME: (torch.zeros(4, 16, 1, 8), None)}, {}, [NAME, "NoneType"]),
        ({NAME: tuple(torch.zeros(4, 16, 1, 8) for _ in range(5))}, {}, [NAME, "5 tensors"]),
        ({NAME: torch.zeros(4, 8, 16, 16)}, {}, [NAME, "NZ order of a 310P", 'set cache_order to "NZ"']),
        ({NAME: torch.zeros(4, 8, 1, 32)}, {"order": "NZ"}, [NAME, "8 tokens a page in NZ order", "block size 16"]),
        ({NAME: torch.zeros(4, 16, 8, 16)}, {"order": "NZ"}, [NAME, "8 tokens a page in NZ order", "block size 16"]),
        (copied(6), {"context_size": 2}, [INDEXER, "6 blocks beside 4", "context parallel size 2"]),
        (copied(12), {"context_size": 2}, [INDEXER, "12 blocks beside 4", "context parallel size 2"]),
        ({NAME: torch.zeros(4, 16, 1, 8)}, {"num_blocks": 0}, ["0 blocks"]),
        ({NAME: torch.zeros(4, 16, 1, 8)}, {"order": "XYZ"}, ["'XYZ'"]),
    ],
)  # fmt: skip
def test_a15_d12_what_cannot_be_moved_is_refused_in_words(
    caches: dict[str, Any], group: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(LayoutError) as error:
        read(caches, **group)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a1_an_entry_in_no_group_is_an_error_not_a_skip() -> None:
    with pytest.raises(LayoutError, match="belong to no KV cache group"):
        read_layouts({NAME: torch.zeros(4, 16, 1, 8)}, [GroupSpec((), 16, 4)])
    with pytest.raises(LayoutError, match="was not registered"):
        read_layouts({}, [GroupSpec((NAME,), 16, 4)])


def test_interleaved_pages_of_one_storage_do_not_overlap() -> None:
    raw = torch.zeros(4 * 2 * 128, dtype=torch.uint8)
    k, v = (raw.as_strided((4, 16, 1, 8), (256, 8, 8, 1), offset) for offset in (0, 128))
    assert read({NAME: (k, v)}).object_bytes == 256
    late = raw.as_strided((3, 16, 1, 8), (256, 8, 8, 1), 200)
    with pytest.raises(LayoutError, match="overlap"):
        read({NAME: (k[:3], late)}, num_blocks=3)


def test_a_block_id_outside_the_registered_blocks_is_misuse() -> None:
    planner = Planner(read({NAME: torch.zeros(9, 16, 1, 8)}))
    for block_id in (-1, 4):
        with pytest.raises(IndexError, match=r"registered are 0\.\.3"):
            planner.addresses([0, block_id])
