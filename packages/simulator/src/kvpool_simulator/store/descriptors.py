"""What the store shows of replicas and buffers: Mooncake's objects, read only."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from kvpool_simulator.store.options import Numbered


class ReplicaStatus(Numbered):
    """State of one replica. Only complete ones are shown to callers."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True)
class Descriptor:
    """Where a replica's bytes are. The endpoint is not the segment's name."""

    size: int
    transport_endpoint: str
    buffer_address: int


@dataclass(frozen=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True)
class ReplicaDescriptor:
    """One replica of an object."""

    status: ReplicaStatus
    memory: MemoryDescriptor

    def is_memory_replica(self) -> bool:
        """Always, here."""
        return True

    def is_disk_replica(self) -> bool:
        """Never, here."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Never, here."""
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Where in memory."""
        return self.memory

    def get_disk_descriptor(self) -> None:
        """Raises `RuntimeError`: the replica is in memory."""
        raise RuntimeError("Expected DiskDescriptor")


class BufferHandle:
    """An object's bytes in the store's own buffer; offers the buffer protocol, writable."""

    def ptr(self) -> int:
        """Address of the first byte."""
        return ctypes.addressof(self)  # type: ignore[arg-type]

    def size(self) -> int:
        """Bytes."""
        return len(self)  # type: ignore[arg-type]


def buffer_handle(value: bytearray) -> BufferHandle:
    """A handle of these bytes."""
    # Before Python 3.12 only ctypes lets a class of ours offer the buffer protocol.
    array = type("BufferHandle", (BufferHandle, ctypes.c_byte * len(value)), {})
    handle: BufferHandle = array.from_buffer(value)  # type: ignore[attr-defined]
    return handle
