"""Where a node's caches lie: on the host, or on an NPU with a twin on the host for the oracle to read and write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvpool_connector.contract.device import Device
from kvpool_connector.host import HostDevice
from kvpool_simulator.device import Caches

ALIGNMENT = 2 << 20


class Memory(Protocol):
    """The memory of one node's caches. The oracle reads and writes `Caches`, which is always on the host."""

    device: Device

    def place(self, caches: Caches) -> dict[str, Any]:
        """What the node registers."""
        ...

    def to_device(self) -> None:
        """What the oracle has written is on the device when this returns."""
        ...

    def from_device(self) -> None:
        """The oracle sees what is on the device now."""
        ...


MemoryFactory = Callable[[], Memory]
"""A module-level function, so that it can cross processes."""


class HostMemory:
    """The caches themselves."""

    def __init__(self) -> None:
        self.device = HostDevice()

    def place(self, caches: Caches) -> dict[str, Any]:
        return caches.kv_caches

    def to_device(self) -> None:
        """It is there."""

    def from_device(self) -> None:
        """It is there."""


class NpuMemory:
    """Each storage of the caches a second time, on an NPU, at the same distance from a multiple of 2 MiB where a cache
    starts on one."""

    def __init__(self, torch_of_npu: Any, device: Device, name: str) -> None:
        """`torch_of_npu`: torch with `torch.npu`; `device`: selected for this thread; `name`: as torch has it."""
        self.device = device
        self._torch = torch_of_npu
        self._name = name
        self._twins: dict[int, tuple[torch.Tensor, Any]] = {}
        """By address of a storage on the host, its bytes, and those on the device."""

    def place(self, caches: Caches) -> dict[str, Any]:
        self.device.bind_thread()
        placed: dict[int, Any] = {}
        entries: dict[str, Any] = {}
        for name, entry in caches.kv_caches.items():
            # A layer that shares another's cache registers the same objects.
            if id(entry) not in placed:
                tensors = [entry] if isinstance(entry, torch.Tensor) else entry
                twins = [self._twin_of(tensor) for tensor in tensors]
                placed[id(entry)] = twins[0] if isinstance(entry, torch.Tensor) else type(entry)(twins)
            entries[name] = placed[id(entry)]
        self.to_device()
        return entries

    def to_device(self) -> None:
        for host, twin in self._twins.values():
            twin.copy_(host)
        self._torch.npu.current_stream().synchronize()

    def from_device(self) -> None:
        for host, twin in self._twins.values():
            host.copy_(twin)

    def _twin_of(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in self._twins:
            host = torch.empty(0, dtype=torch.uint8)
            host.set_(storage)
            # Room in front would let a cache start on a multiple of 2 MiB that the host's has none of.
            off_grid = tensor.data_ptr() // ALIGNMENT * ALIGNMENT < at
            room = 0 if off_grid else ALIGNMENT
            root = self._torch.empty(storage.nbytes() + room, dtype=torch.uint8, device=self._name)
            offset = 0 if off_grid else (at - root.data_ptr()) % ALIGNMENT
            self._twins[at] = host, root[offset : offset + storage.nbytes()]
        _, twin = self._twins[at]
        offset = tensor.data_ptr() - at
        span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        elements = twin[offset : offset + span * tensor.element_size()].view(tensor.dtype)
        return elements.as_strided(tuple(tensor.shape), tensor.stride())
