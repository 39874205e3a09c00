"""Memory of one segment, and what the master knows of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from enum import Enum

from kvpool_simulator.store.space import Space


class SegmentMemory:
    """A mapping of a segment's bytes. The owner creates it; others, in any process, open it while the owner lives."""

    def __init__(self, num_bytes: int, path: str = "") -> None:
        """Create `num_bytes`, or open what the owner named with `path`. Raises `OSError` when the owner is gone."""
        if path:
            self._fd = os.open(path, os.O_RDWR)
        else:
            self._fd = os.memfd_create("kvpool-segment")
            os.ftruncate(self._fd, num_bytes)
        self.path = path or f"/proc/{os.getpid()}/fd/{self._fd}"
        self._memory = mmap.mmap(self._fd, num_bytes)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def close(self) -> None:
        """Give back the descriptor; the mapping goes with the last reference."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Owner(Enum):
    """State of the client whose memory a segment is."""

    ALIVE = "alive"
    DEAD = "dead"
    HUNG = "hung"


@dataclass(eq=False)
class Segment:
    """A mounted segment."""

    name: str
    endpoint: str
    client: int
    path: str
    """File of the memory."""
    space: Space
    owner: Owner = Owner.ALIVE
    silent_since: float = 0.0
    """When the owner died or hung; the master unmounts what is silent for `client_ttl_sec`."""
    mounted_at: float = 0.0
    """From when on it takes objects."""

    def mount_again(self, when: float) -> None:
        """Its owner mounts it anew: empty, though the memory still holds its bytes."""
        self.space = Space(self.space.capacity)
        self.mounted_at = when


@dataclass(frozen=True, slots=True)
class Replica:
    """Where an object's bytes are."""

    segment: str
    endpoint: str
    path: str
    capacity: int
    offset: int
    num_bytes: int
    owner: Owner
