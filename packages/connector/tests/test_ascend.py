"""`ascend.py` on a stand-in of torch_npu: host tensors, events that land when told."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kvpool_connector.registration import GroupSpec, read_layouts


class FakeEvent:
    """Lands after some queries."""

    queries_until_landed = 0

    def record(self) -> None:
        self.left = FakeEvent.queries_until_landed

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


class FakeStream:
    """A stream whose work is done at once."""

    def synchronize(self) -> None:
        """Nothing is pending."""


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    npu = types.SimpleNamespace(
        Event=FakeEvent, Stream=FakeStream, stream=lambda stream: nullcontext(), set_device=lambda index: None
    )
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    module = importlib.import_module("kvpool_connector.ascend")
    device = module.AscendDevice(0)
    device._name = "cpu"
    yield device
    del sys.modules["kvpool_connector.ascend"]


@pytest.mark.parametrize(("queries", "landed"), [(0, True), (3, True), (10**9, False)])
def test_a5_an_event_is_waited_for_within_a_limit(
    ascend: Any, queries: int, landed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEvent, "queries_until_landed", queries)
    assert ascend.record_event().wait(0.02) is landed


def test_blocks_are_copied_out_and_in(ascend: Any) -> None:
    raw = torch.arange(8 * 100, dtype=torch.int32).to(torch.uint8)
    caches = {
        "model.layers.0.attn": (torch.rand(4, 16, 1, 8), torch.randint(0, 99, (4, 16, 1, 3), dtype=torch.int8)),
        "model.layers.1.attn": raw.as_strided((8, 8, 1, 8), (100, 8, 8, 1)),
    }
    (layout,) = read_layouts(caches, [GroupSpec(tuple(caches), 16, 4)])
    staging = ascend.allocate(4 * layout.object_bytes, 2 << 20)
    assert staging.address % (2 << 20) == 0
    copier = ascend.copier(layout, caches, staging)
    pages = [[t.clone() for t in entry] for entry in (caches["model.layers.0.attn"], (raw,))]
    copier.gather([3, 1], staging.address + layout.object_bytes)
    copier.scatter([0, 2], staging.address + layout.object_bytes)
    for now, before in zip(caches["model.layers.0.attn"], pages[0], strict=True):
        assert torch.equal(now[[0, 2]], before[[3, 1]])
        assert torch.equal(now[[1, 3]], before[[1, 3]])
    holes = torch.ones(800, dtype=torch.bool)
    for kernel_block in range(8):
        holes[kernel_block * 100 : kernel_block * 100 + 64] = False
    assert torch.equal(raw[holes], pages[1][0][holes])
    view = raw.view(8, 100)[:, :64]
    assert torch.equal(view[[0, 1, 4, 5]], pages[1][0].view(8, 100)[[6, 7, 2, 3], :64])


def test_checksums_notice_any_flipped_bit_and_name_its_component(ascend: Any) -> None:
    caches = {
        "model.layers.0.attn": (torch.rand(4, 4, 1, 8), torch.randint(0, 99, (4, 4, 1, 3), dtype=torch.int8)),
        "model.layers.1.attn": (torch.rand(4, 4, 1, 8), torch.randint(0, 99, (4, 4, 1, 5), dtype=torch.int8)),
    }
    (layout,) = read_layouts(caches, [GroupSpec(tuple(caches), 4, 4)])
    sizes = [component.page_bytes for component in layout.components]
    assert any(size % 8 for size in sizes), "a page that ends within a word"
    staging = ascend.allocate(4 * layout.object_bytes + 4 * 8 * len(sizes), 2 << 20)
    memory, trailers = staging.owner, staging.address + 4 * layout.object_bytes
    ascend.copier(layout, caches, staging).gather([3, 1, 0, 2], staging.address)
    checksums = ascend.checksums(layout, staging)
    checksums.write(staging.address, 4, trailers)
    assert [checksums.differing(staging.address, i, trailers) for i in range(4)] == [[]] * 4
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    for k, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        for byte in (0, size // 2, size - 1):
            for bit in (0, 7):
                at = 2 * layout.object_bytes + start + byte
                memory[at] ^= 1 << bit
                assert [checksums.differing(staging.address, i, trailers) for i in range(4)] == [[], [], [k], []]
                memory[at] ^= 1 << bit
    read = ascend.read(staging, trailers, 4 * 8 * len(sizes))
    assert read == memory[trailers - staging.address :][: len(read)].numpy().tobytes()
    ascend.write(staging, trailers, read[8:16])
    assert checksums.differing(staging.address, 0, trailers) == [0]
    ascend.write(staging, trailers, read[:8])
    assert checksums.differing(staging.address, 0, trailers) == []
    swapped = memory[:8].clone()
    memory[:8], memory[8:16] = memory[8:16].clone(), swapped
    assert checksums.differing(staging.address, 0, trailers) == [0]
