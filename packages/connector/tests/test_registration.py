"""Layouts from tensors: what is read, and what is refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable
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
        (overlapping(), {}, ["layers.0.a", "layers.1.a", "they overlap", "expected disjoint pages"]),
        ({NAME: (torch.zeros(8, 16, 1, 8), torch.zeros(6, 16, 1, 8))}, {}, [NAME, "unequal", "8", "6"]),
        ({NAME: torch.zeros(3, 16, 1, 8)}, {}, [NAME, "that is 3 blocks", "at least 4"]),
        ({NAME: torch.zeros(4, 16, 2, 8)[:, :, :, :4]}, {}, [NAME, "a hole that is unknown", "strides"]),
        ({NAME: torch.zeros(4, 16, 1, 8).expand(4, 16, 1, 8)[:1].expand(4, 16, 1, 8)}, {}, [NAME, "blocks overlap"]),
        ({NAME: torch.zeros(0, 16, 1, 8)}, {}, [NAME, "at least one block"]),
        ({NAME: torch.zeros(4)}, {}, [NAME, "(num_blocks, *page)"]),
        ({NAME: torch.zeros(4, 5, 1, 8)}, {}, [NAME, "5 tokens", "divisor of the block size 16"]),
        ({NAME: None}, {}, [NAME, "NoneType", "expected a tensor"]),
        ({NAME: {"k": torch.zeros(4, 16, 1, 8)}}, {}, [NAME, "dict", "expected a tensor"]),
        ({NAME: ()}, {}, [NAME, "expected a tensor"]),
        ({NAME: (torch.zeros(4, 16, 1, 8), None)}, {}, [NAME, "NoneType"]),
        ({NAME: tuple(torch.zeros(4, 16, 1, 8) for _ in range(5))}, {},
         [NAME, "found 5, of shapes [(4, 16, 1, 8)", "strides [(128, 8, 8, 1)", "one of [1, 2, 3, 4]"]),
        ({NAME: torch.zeros(4, 8, 16, 16)}, {}, [NAME, "NZ order of a 310P", 'Set cache_order to "NZ"']),
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


UNKNOWN = (
    "Serve this model without the pool, and report this message with the versions of vLLM and vLLM-Ascend: "
    "docs/layouts.md has the layouts that are known"
)
FIVE_PARTS = re.compile(
    r"layer '[^']+', component '\w+'( and layer '[^']+', component '\w+')?: [^:]+: "
    r"found shape \([\d, ]+\), strides \([\d, ]+\).+; expected .+\. [A-Z].+",
    re.DOTALL,
)
"""Layer, component, what is wrong; shape and strides; what would be right; what to do."""


def two_of_unequal_blocks() -> dict[str, Any]:
    return {NAME: (torch.zeros(8, 16, 1, 8), torch.zeros(6, 16, 1, 8))}


REFUSED: list[tuple[Callable[[], dict[str, Any]], dict[str, Any], str]] = [
    (
        lambda: {NAME: torch.zeros(4, 16, 2, 8)[:, :, :, :4]},
        {},
        f"layer '{NAME}', component 'kv': the page has a hole that is unknown: found shape (4, 16, 2, 4), strides "
        "(256, 16, 8, 1) (elements of 4 bytes); expected a page whose 128 elements follow each other; only between "
        f"pages may bytes be unused. {UNKNOWN}",
    ),
    (
        lambda: {NAME: torch.zeros(4, 16, 16, 8)},
        {"open_orders": ("HND",)},
        f"layer '{NAME}', component 'kv': the order of a page's axes is not known: found shape (4, 16, 16, 8), strides "
        "(2048, 128, 8, 1) (elements of 4 bytes), which in blocks of 16 tokens fits NHD and HND alike; expected a "
        'shape that fits one of them, or to be told. Set cache_order to "ND" or "HND", as the engine has it',
    ),
    (
        lambda: {NAME: torch.zeros(4, 16, 16, 16)},
        {"open_orders": ("NZ",)},
        f"layer '{NAME}', component 'kv': the order of a page's axes is not known: found shape (4, 16, 16, 16), "
        "strides (4096, 256, 16, 1) (elements of 4 bytes), which in blocks of 16 tokens fits NHD and NZ alike; "
        'expected a shape that fits one of them, or to be told. Set cache_order to "ND" or "NZ", as the engine has it',
    ),
    (
        lambda: {NAME: torch.zeros(4, 12, 1, 8)},
        {},
        f"layer '{NAME}', component 'kv': the blocks of a group do not divide into pages: found shape (4, 12, 1, 8), "
        "strides (96, 8, 8, 1) (elements of 4 bytes), 12 tokens a page in order 'NHD'; expected a divisor of the block "
        "size 16. Start with a --block-size that is a multiple of it, or set cache_order if the axes have another "
        "order",
    ),
    (
        lambda: {NAME: torch.zeros(4, 8, 1, 32)},
        {"order": "NZ"},
        f"layer '{NAME}', component 'kv': kernel blocks in NZ order are not supported: found shape (4, 8, 1, 32), "
        "strides (256, 32, 32, 1) (elements of 4 bytes), 8 tokens a page in NZ order; expected the block size 16. "
        'Start with --block-size 8, or set cache_order to "ND" if the pages are not in NZ order',
    ),
    (
        lambda: {NAME: torch.zeros(4, 8, 16, 16)},
        {},
        f"layer '{NAME}', component 'kv': this is the NZ order of a 310P, but the order is given as ND: found shape "
        "(4, 8, 16, 16), strides (2048, 256, 16, 1) (elements of 4 bytes); expected (num_blocks, 16, heads, head "
        'size). Set cache_order to "NZ"',
    ),
    (
        lambda: {NAME: torch.zeros(5, 8, 1, 8)},
        {},
        f"layer '{NAME}', component 'kv': the tensor has fewer blocks than the engine hands out: found shape "
        "(5, 8, 1, 8), strides (64, 8, 8, 1) (elements of 4 bytes), that is 5 blocks; expected at least 8 (4 blocks of "
        "16 tokens in 2 pages each). Start without num_gpu_blocks_override. If that does not help: " + UNKNOWN,
    ),
    (
        two_of_unequal_blocks,
        {},
        f"layer '{NAME}', component 'v': components of a layer have unequal numbers of blocks: found shape "
        "(6, 16, 1, 8), strides (128, 8, 8, 1) (elements of 4 bytes), that is 6 blocks; expected 8, as 'k' has: shape "
        f"(8, 16, 1, 8), strides (128, 8, 8, 1) (elements of 4 bytes). {UNKNOWN}",
    ),
    (
        lambda: copied(6),
        {"context_size": 2},
        f"layer '{INDEXER}', component 'dsa_k': the copies of an indexer do not divide: found shape (6, 16, 1, 8), "
        "strides (128, 8, 8, 1) (elements of 4 bytes), that is 6 blocks beside 4 of the attention's; expected as "
        "many, or as many times more as a divisor of the context parallel size 2. Choose decode_context_parallel_size "
        f"and prefill_context_parallel_size that fit. {UNKNOWN}",
    ),
    (
        lambda: {NAME: torch.zeros(4)},
        {},
        f"layer '{NAME}', component 'kv': the tensor has no pages: found shape (4,), strides (1,) (elements of 4 "
        f"bytes); expected (num_blocks, *page), at least one block and no empty axis. {UNKNOWN}",
    ),
    (
        lambda: {NAME: torch.zeros(1, 16, 1, 8).expand(4, 16, 1, 8)},
        {},
        f"layer '{NAME}', component 'kv': blocks overlap: found shape (4, 16, 1, 8), strides (0, 8, 8, 1) (elements of "
        f"4 bytes), a block every 0 bytes; expected at least the page's 512. {UNKNOWN}",
    ),
    (
        lambda: {NAME: torch.zeros(4, 8, 16).permute(0, 2, 1)},
        {},
        f"layer '{NAME}', component 'kv': the page's axes are permuted and their meaning is unknown: found shape "
        "(4, 16, 8), strides (128, 1, 16) (elements of 4 bytes), order 'NHD'; expected 3 axes in each page, or axes in "
        f"the order of memory. {UNKNOWN}",
    ),
    (
        lambda: {
            NAME: torch.zeros(4, 16, 1, 8),
            INDEXER: (torch.zeros(16, 100).as_strided((16, 8, 1, 8), (100, 8, 8, 1)),),
        },
        {"context_size": 2},
        f"layer '{INDEXER}', component 'dsa_k': copies of an indexer's padded kernel blocks are unknown: found shape "
        "(16, 8, 1, 8), strides (100, 8, 8, 1) (elements of 4 bytes): 2 copies of blocks that are 2 padded pages each; "
        f"expected pages without holes. {UNKNOWN}",
    ),
]


@pytest.mark.parametrize(("make", "group", "message"), REFUSED)
def test_a_refusal_says_layer_component_shape_strides_and_remedy(
    make: Callable[[], dict[str, Any]], group: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError) as error:
        read(make(), **group)
    assert str(error.value) == message
    assert FIVE_PARTS.fullmatch(message)


def test_an_overlap_is_refused_with_both_views() -> None:
    caches = overlapping()
    first, second = caches.values()
    with pytest.raises(LayoutError) as error:
        read(caches)
    found = "shape (4, 16, 1, 8), strides (128, 8, 8, 1) (elements of 4 bytes), pages of 512 bytes every 512 from"
    assert str(error.value) == (
        "layer 'layers.0.a', component 'kv' and layer 'layers.1.a', component 'kv': they overlap, and neither covers "
        f"the other's pages: found {found} {first.data_ptr():#x}, and {found} {second.data_ptr():#x}; expected "
        f"disjoint pages, one view that covers a layer's others, or the very same tensors in two layers. {UNKNOWN}"
    )
    assert FIVE_PARTS.fullmatch(str(error.value))


def test_a_shape_that_fits_one_open_order_tells_it() -> None:
    """Only with as many heads as tokens, or blocks to spare for the other reading, is nothing told."""
    orders: dict[str, Any] = {"open_orders": ("HND",)}
    for shape, order in (((4, 16, 2, 8), "NHD"), ((4, 2, 16, 8), "HND"), ((4, 16, 1, 8), "NHD"), ((4, 16, 8), "NHD")):
        assert read({NAME: torch.zeros(shape)}, **orders).components[0].order == order
    with pytest.raises(LayoutError, match="order of a page's axes is not known"):
        read({NAME: torch.zeros(32, 2, 16, 8)}, **orders)
    told = read({NAME: torch.zeros(4, 16, 16, 8)})
    assert told.components[0].order == "NHD"


def test_an_open_nz_refuses_no_latent_nor_a_state() -> None:
    orders: dict[str, Any] = {"open_orders": ("NZ",)}
    for shape in ((4, 16, 1, 16), (4, 16, 2, 16), (4, 16, 16)):
        assert read({NAME: torch.zeros(shape)}, **orders).components[0].order == "NHD"
    assert read({NAME: torch.zeros(4, 16, 16, 16)}, kind="state", **orders).object_bytes == 16 * 16 * 16 * 4


def test_a1_an_entry_in_no_group_is_an_error_not_a_skip() -> None:
    with pytest.raises(LayoutError, match="registered, but in no KV cache group"):
        read_layouts({NAME: torch.zeros(4, 16, 1, 8)}, [GroupSpec((), 16, 4)])
    with pytest.raises(LayoutError, match="but not registered: found group 0"):
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
