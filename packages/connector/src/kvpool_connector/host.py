"""The device of a machine without one: KV cache in host memory, no queue of work."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvpool_connector.contract.device import CHECKSUM_BYTES, Buffer
from kvpool_connector.contract.layout import ShardLayout

Bytes = NDArray[np.uint8]

RUN_BYTES = 16 << 10
"""Neighbouring blocks are copied at once where that is at least so many bytes of a piece on average. Such a copy needs
no memory in between and lets other threads run meanwhile; where runs are shorter, gathering by index is faster."""


class Landed:
    """The event of a device that has done its work when the call returns."""

    def wait(self, timeout_s: float) -> bool:
        """True: there is nothing to wait for."""
        return True


class HostDevice:
    """Host memory, as vLLM on a CPU and the simulator have it."""

    def bind_thread(self) -> None:
        """Nothing: any thread may use the host's memory."""

    def record_event(self) -> Landed:
        """An event that has already happened."""
        return Landed()

    def order_late_copies(self) -> None:
        """Nothing: a copy has landed when its call returns."""

    def allocate(self, num_bytes: int, alignment: int) -> Buffer:
        """Anonymous memory; pages cost nothing until touched. `alignment` is a power of two, in bytes."""
        memory = mmap.mmap(-1, num_bytes + alignment)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return Buffer(-(-start // alignment) * alignment, num_bytes, memory)

    def copier(
        self, layout: ShardLayout, kv_caches: Mapping[str, Any], staging: Buffer, stride: int | None = None
    ) -> HostCopier:
        """See `kvpool_connector.contract.device.Device`; in host memory addresses are enough."""
        return HostCopier(layout, stride or layout.object_bytes)

    def checksums(self, layout: ShardLayout, staging: Buffer, stride: int | None = None) -> HostChecksums:
        """See `kvpool_connector.contract.device.Device`; in host memory addresses are enough."""
        return HostChecksums(layout, stride)

    def read(self, staging: Buffer, address: int, num_bytes: int) -> bytes:
        """See `kvpool_connector.contract.device.Device`."""
        return ctypes.string_at(address, num_bytes)

    def write(self, staging: Buffer, address: int, data: bytes) -> None:
        """See `kvpool_connector.contract.device.Device`."""
        ctypes.memmove(address, data, len(data))


class HostChecksums:
    """XXH3 of each component, which reads memory as fast as it can be read and lets other threads run meanwhile."""

    algorithm = "xxh3-64"

    def __init__(self, layout: ShardLayout, stride: int | None = None) -> None:
        self._object_bytes = layout.object_bytes
        self._stride = stride or layout.object_bytes
        self._sums_stride = stride or CHECKSUM_BYTES * len(layout.components)
        ends = list(itertools.accumulate(component.page_bytes for component in layout.components))
        self._bounds = list(zip([0, *ends[:-1]], ends, strict=True))

    def write(self, address: int, count: int, target: int) -> None:
        """See `kvpool_connector.contract.device.Checksums`."""
        for i in range(count):
            for k, digest in enumerate(self._digests(address, i)):
                ctypes.memmove(target + i * self._sums_stride + CHECKSUM_BYTES * k, digest, CHECKSUM_BYTES)

    def differing(self, address: int, index: int, target: int) -> list[int]:
        """See `kvpool_connector.contract.device.Checksums`."""
        stored = ctypes.string_at(target + index * self._sums_stride, CHECKSUM_BYTES * len(self._bounds))
        return [
            k
            for k, digest in enumerate(self._digests(address, index))
            if digest != stored[k * CHECKSUM_BYTES : (k + 1) * CHECKSUM_BYTES]
        ]

    def _digests(self, address: int, index: int) -> Iterator[bytes]:
        pages = _memory(address + index * self._stride, self._object_bytes).data
        return (xxhash.xxh3_64_digest(pages[start:end]) for start, end in self._bounds)


class HostCopier:
    """Copies between a cache in host memory and objects, a component of all blocks at a time."""

    def __init__(self, layout: ShardLayout, stride: int) -> None:
        self._object_bytes = layout.object_bytes
        self._stride = stride
        self._num_blocks = layout.num_blocks
        self._pages: list[tuple[slice, Bytes]] = []
        """Each component's part of an object and its pages, `(num_blocks, num_pieces, piece_bytes)`."""
        end = 0
        for c in layout.components:
            start, end = end, end + c.page_bytes
            shape = (layout.num_blocks, c.num_pieces, c.piece_bytes)
            strides = (c.block_stride, c.piece_stride, 1)
            span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
            self._pages.append((slice(start, end), as_strided(_memory(c.base_address, span), shape, strides)))

    def gather(self, block_ids: Sequence[int], address: int) -> None:
        """See `kvpool_connector.contract.device.Copier`."""
        ids, objects = self._arrays(block_ids, address)
        runs = _runs(ids)
        for part, pages in self._pages:
            # Splitting the last axis of an array makes a view.
            target = objects[:, part].reshape(-1, *pages.shape[1:])
            if target.size < RUN_BYTES * len(runs):
                target[:] = pages[ids]
                continue
            for start, end, first in runs:
                target[start:end] = pages[first : first + end - start]

    def scatter(self, block_ids: Sequence[int], address: int) -> None:
        """See `kvpool_connector.contract.device.Copier`."""
        ids, objects = self._arrays(block_ids, address)
        runs = _runs(ids)
        for part, pages in self._pages:
            source = objects[:, part].reshape(-1, *pages.shape[1:])
            if source.size < RUN_BYTES * len(runs):
                pages[ids] = source
                continue
            for start, end, first in runs:
                pages[first : first + end - start] = source[start:end]

    def _arrays(self, block_ids: Sequence[int], address: int) -> tuple[NDArray[np.int64], Bytes]:
        ids = np.asarray(block_ids, dtype=np.int64)
        # Negative ids would count from the end.
        if len(ids) and (ids.min() < 0 or ids.max() >= self._num_blocks):
            raise IndexError(f"block ids {ids.min()}..{ids.max()} asked for; registered are 0..{self._num_blocks - 1}")
        span = (len(ids) - 1) * self._stride + self._object_bytes if len(ids) else 0
        return ids, as_strided(_memory(address, span), (len(ids), self._object_bytes), (self._stride, 1))


def _memory(address: int, num_bytes: int) -> Bytes:
    """The bytes at an address, not copied."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def _runs(ids: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """`(start, end, first)`: `ids[start:end]` are `first`, `first + 1` and so on."""
    cuts = (np.flatnonzero(np.diff(ids) != 1) + 1).tolist()
    return [
        (start, end, int(ids[start])) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True) if end > start
    ]
