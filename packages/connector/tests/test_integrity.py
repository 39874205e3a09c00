"""Checksums of objects: where they lie, what they notice, and what is said."""

from __future__ import annotations

import ctypes
import logging
import random

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from stores import DictStore

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.errors import ConfigError
from kvpool_connector.contract.layout import Component, Layer, ShardLayout
from kvpool_connector.contract.status import Status
from kvpool_connector.host import HostChecksums, HostDevice
from kvpool_connector.integrity import Integrity, spacing
from kvpool_connector.registration import GroupSpec, read_layouts
from kvpool_connector.staging import Staging
from kvpool_connector.transfer import PackedTransfer, Unheld

SIZES = (24, 7, 65)
LAYOUT = ShardLayout(
    0,
    16,
    4,
    (
        Layer("0", ("a",), tuple(Component(f"c{k}", "int8", (n,), "NHD", 0, n, n) for k, n in enumerate(SIZES[:2]))),
        Layer("1", ("b",), (Component("c2", "int8", (SIZES[2],), "NHD", 0, SIZES[2], SIZES[2]),)),
    ),
)
COUNT = 5
STRIDE = sum(SIZES) + 24


class Chunk:
    """Five objects of 96 bytes, each with its checksums behind it."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(random.Random(3).randbytes(COUNT * STRIDE), COUNT * STRIDE)
        self.objects = ctypes.addressof(self.memory)
        self.trailers = self.objects + sum(SIZES)

    def flip(self, bit: int) -> None:
        self.memory[bit // 8] = bytes([self.memory[bit // 8][0] ^ (1 << bit % 8)])


def test_checksums_are_those_of_each_component_in_order() -> None:
    chunk = Chunk()
    before = chunk.memory.raw
    HostChecksums(LAYOUT, STRIDE).write(chunk.objects, COUNT, chunk.trailers)
    expected = b""
    for i in range(COUNT):
        start = STRIDE * i
        expected += before[start : start + 96]
        for size in SIZES:
            expected += xxhash.xxh3_64_digest(before[start : start + size])
            start += size
    assert chunk.memory.raw == expected


@given(st.integers(0, COUNT * (96 + 24) * 8 - 1))
def test_any_flipped_bit_is_noticed_where_it_is_and_nowhere_else(bit: int) -> None:
    chunk = Chunk()
    checksums = HostChecksums(LAYOUT, STRIDE)
    checksums.write(chunk.objects, COUNT, chunk.trailers)
    chunk.flip(bit)
    index, rest = divmod(bit // 8, STRIDE)
    component = (rest - 96) // 8 if rest >= 96 else 0 if rest < 24 else 1 if rest < 31 else 2
    found = [checksums.differing(chunk.objects, i, chunk.trailers) for i in range(COUNT)]
    assert found == [[component] if i == index else [] for i in range(COUNT)]


def test_one_line_names_the_first_key_and_its_components(caplog: pytest.LogCaptureFixture) -> None:
    chunk = Chunk()
    integrity = Integrity(HostChecksums(LAYOUT, STRIDE), LAYOUT, sample_every=1)
    integrity.seal(chunk.objects, COUNT, chunk.trailers)
    keys = [f"key{i}" for i in range(COUNT)]
    assert integrity.broken(keys, range(COUNT), chunk.objects, chunk.trailers) == []
    for byte in (STRIDE, STRIDE + 31, STRIDE * 3):
        chunk.flip(8 * byte)
    assert integrity.broken(keys, range(COUNT), chunk.objects, chunk.trailers) == [1, 3]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "count=2 of=5 first=key1 components=0.c0,1.c2" in line
    assert integrity.broken(keys, [0, 2, 4], chunk.objects, chunk.trailers) == []


def test_a_sample_is_one_in_so_many_over_all_loads() -> None:
    chunk = Chunk()
    integrity = Integrity(HostChecksums(LAYOUT, STRIDE), LAYOUT, sample_every=4)
    keys = [f"key{i}" for i in range(COUNT)]
    found = [integrity.broken(keys, range(COUNT), chunk.objects, chunk.trailers) for _ in range(4)]
    assert found == [[0, 4], [3], [2], [1]]


@pytest.mark.parametrize("integrity", ["on", "sampled"])
def test_direct_transfer_has_no_place_for_checksums(integrity: str) -> None:
    with pytest.raises(ConfigError, match=r"integrity = '.*' needs the staging area; set transfer to \"packed\""):
        PoolSettings.from_extra_config({"transfer": "direct", "integrity": integrity})


def test_b6_a_broken_object_is_reported_alone_and_removed() -> None:
    """What is left in the store would be hit by every request to come, and nobody would put a right one there."""
    caches = {"model.layers.0.attn": (torch.rand(8, 4, 1, 8), torch.rand(8, 4, 1, 5))}
    (layout,) = read_layouts(caches, [GroupSpec(tuple(caches), 4, 8)])
    store, device = DictStore(), HostDevice()
    staging = Staging(store, device, 4 << 20, layout.object_bytes + 16)
    stride = spacing(layout)
    integrity = Integrity(device.checksums(layout, staging.buffer, stride), layout, sample_every=1)
    copier = device.copier(layout, caches, staging.buffer, stride)
    transfer = PackedTransfer(store, layout, copier, staging, 1.0, integrity)
    keys = [f"k{i}" for i in range(4)]
    assert transfer.save(keys, [0, 1, 2, 3], Unheld()) == [Status.OK] * 4
    assert {len(value) for value in store.objects.values()} == {layout.object_bytes + 16}
    whole = store.objects["k2"]
    store.objects["k2"] = whole[:100] + bytes([whole[100] ^ 4]) + whole[101:]
    saved = [tensor.clone() for tensor in caches["model.layers.0.attn"]]
    loaded = transfer.load([*keys, "none"], [4, 5, 6, 7, 0], Unheld())
    assert loaded == [Status.OK, Status.OK, Status.CORRUPT, Status.OK, Status.MISS]
    assert sorted(store.objects) == ["k0", "k1", "k3"]
    for now, before in zip(caches["model.layers.0.attn"], saved, strict=True):
        assert torch.equal(now[[4, 5, 7]], before[[0, 1, 3]])
        assert torch.equal(now[[6, 0]], before[[6, 0]])


def test_an_object_and_its_checksums_are_one_piece_though_several_share_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second piece an object cost a load over TCP 2 % and more."""
    caches = {"model.layers.0.attn": (torch.rand(8, 4, 1, 8), torch.rand(8, 4, 1, 5))}
    (layout,) = read_layouts(caches, [GroupSpec(tuple(caches), 4, 8)])
    store, device = DictStore(), HostDevice()
    staging = Staging(store, device, 1 << 20, 1)
    stride = spacing(layout)
    integrity = Integrity(device.checksums(layout, staging.buffer, stride), layout, sample_every=1)
    copier = device.copier(layout, caches, staging.buffer, stride)
    transfer = PackedTransfer(store, layout, copier, staging, 1.0, integrity)
    asked: list[tuple[list[list[int]], list[list[int]]]] = []
    for name in ("put", "get"):
        call = getattr(store, name)
        monkeypatch.setattr(store, name, lambda keys, *pieces, call=call: asked.append(pieces) or call(keys, *pieces))
    keys = [f"k{i}" for i in range(4)]
    assert transfer.save(keys, [0, 1, 2, 3], Unheld()) == transfer.load(keys, [4, 5, 6, 7], Unheld()) == [Status.OK] * 4
    assert len(asked) == 2
    for addresses, sizes in asked:
        assert sizes == [[layout.object_bytes + 16]] * 4
        assert [(address - addresses[0][0]) % 4096 for (address,) in addresses] == [0] * 4
