"""Copies in host memory, by index and in runs of neighbours; the staging area's order."""

from __future__ import annotations

import numpy as np
import pytest
from stores import DictStore

from kvpool_connector import host
from kvpool_connector.contract.layout import REGION_ALIGNMENT, Component, Layer, ShardLayout
from kvpool_connector.host import HostDevice
from kvpool_connector.staging import Staging

NUM_BLOCKS, PAGES, GAP = 12, (24, 40), 8


@pytest.mark.parametrize("run_bytes", [0, 1 << 10, 1 << 40])
@pytest.mark.parametrize("stride", [sum(PAGES), 96])
@pytest.mark.parametrize("ids", [[5], [2, 3, 4, 5], [7, 3, 4, 11, 10, 0], [9, 8], [0, 1, 10, 11]])
def test_blocks_are_copied_whole_and_nothing_else(
    run_bytes: int, ids: list[int], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "RUN_BYTES", run_bytes)
    random = np.random.default_rng(1)
    caches = [random.integers(0, 256, (NUM_BLOCKS, page + GAP), dtype=np.uint8) for page in PAGES]
    before = [cache.copy() for cache in caches]
    components = tuple(
        Component(str(i), "int8", (page, 1, 1), "NHD", cache.ctypes.data, page + GAP, page)
        for i, (cache, page) in enumerate(zip(caches, PAGES, strict=True))
    )
    layout = ShardLayout(0, 1, NUM_BLOCKS, (Layer("0", ("0",), components),))
    device = HostDevice()
    staging = device.allocate(len(ids) * stride, REGION_ALIGNMENT)
    copier = device.copier(layout, {}, staging, stride)

    copier.gather(ids, staging.address)
    objects = host._memory(staging.address, staging.num_bytes).reshape(len(ids), stride)
    expected = np.hstack([cache[ids, :page] for cache, page in zip(before, PAGES, strict=True)])
    assert np.array_equal(objects[:, : sum(PAGES)], expected)
    assert not objects[:, sum(PAGES) :].any(), "what lies behind an object is not the copier's"

    objects ^= 0xFF
    copier.scatter(ids, staging.address)
    for cache, old, page in zip(caches, before, PAGES, strict=True):
        old[ids, :page] ^= 0xFF
        assert np.array_equal(cache, old)


def test_the_chunk_used_last_is_lent_first() -> None:
    staging = Staging(DictStore(), HostDevice(), 48 << 20, 1 << 20)
    with staging.chunk(1) as first, staging.chunk(1):
        pass
    with staging.chunk(1) as again:
        assert again == first
