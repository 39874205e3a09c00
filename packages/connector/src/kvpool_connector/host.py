"""The device of a machine without one: KV cache in host memory, no queue of work."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvpool_connector.contract.device import Buffer
from kvpool_connector.contract.layout import ShardLayout

Bytes = NDArray[np.uint8]


class Landed:
    """The event of a device that has done its work when the call returns."""

    def wait(self, timeout_s: float) -> bool:
        """True: there is nothing to wait for."""
        return True


class HostDevice:
    """Host memory, as vLLM on a CPU and the simulator have it."""

    def record_event(self) -> Landed:
        """An event that has already happened."""
        return Landed()

    def allocate(self, num_bytes: int, alignment: int) -> Buffer:
        """Anonymous memory; pages cost nothing until touched. `alignment` is a power of two, in bytes."""
        memory = mmap.mmap(-1, num_bytes + alignment)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return Buffer(-(-start // alignment) * alignment, num_bytes, memory)

    def copier(self, layout: ShardLayout, kv_caches: Mapping[str, Any], staging: Buffer) -> HostCopier:
        """See `kvpool_connector.contract.device.Device`; in host memory addresses are enough."""
        return HostCopier(layout)


class HostCopier:
    """Copies between a cache in host memory and dense objects, a piece of all blocks at a time."""

    def __init__(self, layout: ShardLayout) -> None:
        self._object_bytes = layout.object_bytes
        self._num_blocks = layout.num_blocks
        self._pieces: list[tuple[int, Bytes]] = []
        offset = 0
        for component in layout.components:
            for address, size in component.pieces(0):
                span = (layout.num_blocks - 1) * component.block_stride + size
                view = as_strided(_memory(address, span), (layout.num_blocks, size), (component.block_stride, 1))
                self._pieces.append((offset, view))
                offset += size

    def gather(self, block_ids: Sequence[int], address: int) -> None:
        """See `kvpool_connector.contract.device.Copier`."""
        ids, objects = self._arrays(block_ids, address)
        for offset, view in self._pieces:
            objects[:, offset : offset + view.shape[1]] = view[ids]

    def scatter(self, block_ids: Sequence[int], address: int) -> None:
        """See `kvpool_connector.contract.device.Copier`."""
        ids, objects = self._arrays(block_ids, address)
        for offset, view in self._pieces:
            view[ids] = objects[:, offset : offset + view.shape[1]]

    def _arrays(self, block_ids: Sequence[int], address: int) -> tuple[NDArray[np.int64], Bytes]:
        ids = np.asarray(block_ids, dtype=np.int64)
        # Negative ids would count from the end.
        if len(ids) and (ids.min() < 0 or ids.max() >= self._num_blocks):
            raise IndexError(f"block ids {ids.min()}..{ids.max()} asked for; registered are 0..{self._num_blocks - 1}")
        return ids, _memory(address, len(ids) * self._object_bytes).reshape(len(ids), self._object_bytes)


def _memory(address: int, num_bytes: int) -> Bytes:
    """The bytes at an address, not copied."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
