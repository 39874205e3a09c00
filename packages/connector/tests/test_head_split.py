"""What a rank holds, split by KV heads, against slices of the tensors themselves."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from kvpool_connector.contract.errors import LayoutError
from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.head_split import split_heads
from kvpool_connector.host import HostDevice
from kvpool_connector.registration import GroupSpec, read_layouts

NAME = "model.layers.0.self_attn.attn"
BLOCKS, TOKENS, HEADS, DIM = 4, 16, 4, 8


def numbers(*shape: int) -> torch.Tensor:
    """A tensor in which every element is another one."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def layout_of(tensors: tuple[torch.Tensor, ...], **group: Any) -> ShardLayout:
    (layout,) = read_layouts({NAME: tensors}, [GroupSpec((NAME,), TOKENS, BLOCKS, **group)])
    return layout


def gathered(layout: ShardLayout, block_ids: list[int]) -> torch.Tensor:
    """The objects of these blocks, `(len(block_ids), elements)`."""
    device = HostDevice()
    staging = device.allocate(len(block_ids) * layout.object_bytes, 64)
    device.copier(layout, {}, staging).gather(block_ids, staging.address)
    raw = bytearray(ctypes.string_at(staging.address, len(block_ids) * layout.object_bytes))
    return torch.frombuffer(raw, dtype=torch.int32).reshape(len(block_ids), -1)


def tokens_first() -> tuple[torch.Tensor, torch.Tensor]:
    """`k` as `(blocks, tokens, heads, dim)`, and the same values as a view of it."""
    k = numbers(BLOCKS, TOKENS, HEADS, DIM)
    return k, k


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    page = TOKENS * HEADS * DIM
    k = numbers(BLOCKS * (page + 24)).as_strided((BLOCKS, TOKENS, HEADS, DIM), (page + 24, HEADS * DIM, DIM, 1))
    return k, k


def heads_first() -> tuple[torch.Tensor, torch.Tensor]:
    k = numbers(BLOCKS, HEADS, TOKENS, DIM).transpose(1, 2)
    return k, k


def kernel_blocks() -> tuple[torch.Tensor, torch.Tensor]:
    k = numbers(BLOCKS * 4, TOKENS // 4, HEADS, DIM)
    return k, k.reshape(BLOCKS, TOKENS, HEADS, DIM)


def kernel_blocks_heads_first() -> tuple[torch.Tensor, torch.Tensor]:
    k = numbers(BLOCKS * 4, HEADS, TOKENS // 4, DIM).transpose(1, 2)
    return k, k.reshape(BLOCKS, TOKENS, HEADS, DIM)


def kernel_blocks_heads_first_padded() -> tuple[torch.Tensor, torch.Tensor]:
    page = TOKENS // 4 * HEADS * DIM
    raw = numbers(BLOCKS * 4 * (page + 8))
    k = raw.as_strided((BLOCKS * 4, TOKENS // 4, HEADS, DIM), (page + 8, DIM, TOKENS // 4 * DIM, 1))
    return k, k.reshape(BLOCKS, TOKENS, HEADS, DIM)


WAYS = [tokens_first, padded, heads_first, kernel_blocks, kernel_blocks_heads_first, kernel_blocks_heads_first_padded]


@pytest.mark.parametrize("way", WAYS)
def test_one_head_is_said_and_stored_alike_however_the_axes_lie(way: Any) -> None:
    tensor, values = way()
    shards = split_heads(layout_of((tensor, tensor.clone(memory_format=torch.preserve_format))), HEADS, 1)
    assert len(shards) == HEADS
    for head, shard in enumerate(shards):
        assert [(c.name, c.page_shape, c.order) for c in shard.components] == [
            ("k", (TOKENS, 1, DIM), "NHD"),
            ("v", (TOKENS, 1, DIM), "NHD"),
        ]
        found = gathered(shard, [2, 0, 3])[:, : TOKENS * DIM]
        assert torch.equal(found, values[[2, 0, 3], :, head].reshape(3, -1))


@pytest.mark.parametrize("way", [tokens_first, padded, kernel_blocks])
@pytest.mark.parametrize("count", [2, 4])
def test_heads_of_a_token_stay_together(way: Any, count: int) -> None:
    tensor, values = way()
    for i, shard in enumerate(split_heads(layout_of((tensor, numbers(BLOCKS, TOKENS, HEADS, DIM))), HEADS, count)):
        assert shard.components[0].page_shape == (TOKENS, count, DIM)
        wanted = values[[3, 1], :, i * count : (i + 1) * count]
        assert torch.equal(gathered(shard, [3, 1])[:, : wanted[0].numel()], wanted.reshape(2, -1))


def test_heads_first_pages_are_cut_into_single_runs() -> None:
    tensor, _ = heads_first()
    for i, shard in enumerate(split_heads(layout_of((tensor, tensor.clone())), HEADS, 2)):
        k = shard.components[0]
        assert (k.page_shape, k.order, k.num_pieces) == ((2, TOKENS, DIM), "HND", 1)
        wanted = tensor.transpose(1, 2)[[3, 1], 2 * i : 2 * i + 2]
        assert torch.equal(gathered(shard, [3, 1])[:, : 2 * TOKENS * DIM], wanted.reshape(2, -1))


def test_a_310ps_columns_go_with_their_head() -> None:
    k = numbers(BLOCKS, HEADS * 2, TOKENS, 16)
    for head, shard in enumerate(split_heads(layout_of((k, numbers(*k.shape)), order="NZ"), HEADS, 1)):
        assert (shard.components[0].page_shape, shard.components[0].order) == ((2, TOKENS, 16), "NZ")
        wanted = k[[1, 0], 2 * head : 2 * head + 2].reshape(2, -1)
        assert torch.equal(gathered(shard, [1, 0])[:, : wanted.shape[1]], wanted)


def test_what_has_no_heads_stays_whole_where_nothing_is_split() -> None:
    latent = layout_of((numbers(BLOCKS, TOKENS, 8), numbers(BLOCKS, TOKENS, 2)), kind="latent")
    assert split_heads(latent, 1, 1) == [latent]


@pytest.mark.parametrize(
    ("tensor", "group", "words"),
    [
        (numbers(BLOCKS, TOKENS, 8), {}, r"a page of shape \(16, 8\) in order 'NHD'.*an axis of 4 heads"),
        (numbers(BLOCKS, TOKENS, 2, DIM), {}, r"\(16, 2, 8\).*an axis of 4 heads"),
        (numbers(BLOCKS, 6, TOKENS, 16), {"order": "NZ"}, r"\(6, 16, 16\) in order 'NZ'.*an axis of 4 heads"),
        (
            numbers(8 * 264).as_strided((8, 8, HEADS, DIM), (264, HEADS * DIM, DIM, 1)),
            {},
            "2 runs of 1024 bytes every 1056.*pages without holes, or one hole after each row of 4 heads",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_in_words(tensor: torch.Tensor, group: dict[str, Any], words: str) -> None:
    layout = layout_of((tensor, tensor.clone(memory_format=torch.preserve_format)), **group)
    with pytest.raises(LayoutError, match=rf'layer 0, component.* {words}\. Set kv_head_split to "rank"'):
        split_heads(layout, HEADS, 1)
