"""Copies in host memory, by index and in runs of neighbours; the staging area's order."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from stores import DictStore

from kvpool_connector import host
from kvpool_connector.contract.device import DeviceLateError
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


class _Switch:
    """An event that happens when it is told to."""

    happened = False

    def wait(self, timeout_s: float) -> bool:
        return self.happened


def _late_with(staging: Staging, event: _Switch | None) -> int | None:
    """The chunk with which the device was late."""
    used: list[int | None] = []
    with contextlib.suppress(DeviceLateError), staging.chunk(0) as chunk:
        used.append(chunk)
        raise DeviceLateError(2.5, event)
    return used[0]


def test_chunks_that_the_device_may_still_write_are_lent_to_nobody_until_its_work_has_landed() -> None:
    staging, event = Staging(DictStore(), HostDevice(), 48 << 20, 1 << 20), _Switch()
    used = [_late_with(staging, event) for _ in range(3)]
    assert len(set(used)) == 3
    # Whoever comes now is not kept waiting, and is told the limit that has passed.
    with pytest.raises(DeviceLateError, match=r"earlier work.* within 2\.5 s"), staging.chunk(3600):
        pass
    event.happened = True
    with staging.chunk(0) as one, staging.chunk(0) as two, staging.chunk(0) as three:
        assert {one, two, three} == set(used)


def test_a_chunk_that_was_given_no_work_is_free_at_once() -> None:
    staging = Staging(DictStore(), HostDevice(), 48 << 20, 1 << 20)
    first = _late_with(staging, None)
    with staging.chunk(0) as again:
        assert again == first
