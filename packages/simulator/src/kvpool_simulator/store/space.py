"""Memory of one segment: shared by file descriptor, so that clients in other processes copy from and to it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict


class SegmentMemory:
    """A mapping of a segment's bytes. The owner creates it; others open it by path while the owner lives."""

    def __init__(self, num_bytes: int, path: str = "") -> None:
        """Create `num_bytes`, or open what the owner named with `path`."""
        if path:
            self._fd = os.open(path, os.O_RDWR)
        else:
            self._fd = os.memfd_create("kvpool-segment")
            os.ftruncate(self._fd, num_bytes)
        self.path = path or f"/proc/{os.getpid()}/fd/{self._fd}"
        self._memory = mmap.mmap(self._fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of some bytes."""
        return self._memory[offset : offset + num_bytes]

    def write(self, offset: int, value: bytes) -> None:
        """Change some bytes."""
        self._memory[offset : offset + len(value)] = value

    def close(self) -> None:
        """Give back the descriptor; the mapping goes with the last reference."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Space:
    """Who has which bytes of a segment. Freed runs are reused by exact size first, else cut from a larger run."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a free run, or None when there is none."""
        offset = self._take(num_bytes)
        if offset is not None:
            self.used += num_bytes
        return offset

    def _take(self, num_bytes: int) -> int | None:
        if self._free.get(num_bytes):
            return self._free[num_bytes].pop()
        if self._end + num_bytes <= self.capacity:
            self._end += num_bytes
            return self._end - num_bytes
        larger = min((size for size, runs in self._free.items() if runs and size > num_bytes), default=None)
        if larger is None:
            self._merge()
            larger = min((size for size, runs in self._free.items() if runs and size >= num_bytes), default=None)
        if larger is None:
            return None
        offset = self._free[larger].pop()
        if larger > num_bytes:
            self._free[larger - num_bytes].append(offset + num_bytes)
        return offset

    def _merge(self) -> None:
        """Join neighbouring free runs."""
        runs = sorted((offset, size) for size, offsets in self._free.items() for offset in offsets)
        self._free.clear()
        merged: list[tuple[int, int]] = []
        for offset, size in runs:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        for offset, size in merged:
            if offset + size == self._end:
                self._end = offset
            else:
                self._free[size].append(offset)

    def free(self, offset: int, num_bytes: int) -> None:
        """Give back a run."""
        self.used -= num_bytes
        self._free[num_bytes].append(offset)
