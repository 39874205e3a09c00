"""The memory of a simulated NPU: one host allocation in which every byte that is no page is a guard byte."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool_simulator.device.intervals import Intervals, Offsets, complement, merge, runs

GUARD = 0xA5
"""The byte that fills all memory that belongs to no page."""
POISON = 0xDB
"""The byte that fills pages which nothing has written yet."""
START_ALIGNMENT = 2 << 20
"""Where raw tensors start when KV transfer is on (vLLM-Ascend, `worker/model_runner_v1.py`), in bytes."""
ALLOCATOR_ALIGNMENT = 512
"""Alignment of an allocation that nobody aligned further, in bytes."""
GUARD_BYTES = 4096
"""The least number of guard bytes on either side of an allocation."""

Bytes = NDArray[np.uint8]
_STEP = 8 << 20


@dataclass(frozen=True)
class Damage:
    """A run of bytes that changed and should not have."""

    address: int
    offset: int
    """Bytes from the start of the arena."""
    size: int
    found: bytes
    """The first bytes found there, 8 at most."""
    nearest: str
    """The nearest page in words: layer, component, block, and how far away."""

    def __str__(self) -> str:
        return f"{self.size} bytes at offset {self.offset} are now {self.found.hex(' ')}: {self.nearest}"


@dataclass(frozen=True)
class Storage:
    """One allocation as torch sees it: its own storage, of which `raw` is the usable part."""

    raw: torch.Tensor
    """int8, `(num_bytes,)`."""
    address: int
    num_bytes: int


@dataclass(frozen=True)
class _Claim:
    label: str
    starts: Offsets
    size: int
    kernel_blocks: int


class Arena:
    """Memory with bounds, guards and poison. `buffer` is any writable buffer, such as the `buf` of a shared memory."""

    def __init__(self, buffer: mmap.mmap | memoryview | bytearray) -> None:
        self._buffer = buffer
        self.memory: Bytes = np.frombuffer(buffer, np.uint8)
        if not self.memory.flags.writeable:
            raise ValueError("the buffer of an arena must be writable: found a read-only one; pass a mutable buffer")
        self.address: int = self.memory.ctypes.data
        self.num_bytes = len(self.memory)
        self.memory.fill(GUARD)
        # Places are counted from a 2 MiB boundary, so that they do not depend on where the host put the buffer.
        self._next = -self.address % START_ALIGNMENT + GUARD_BYTES
        self._claims: list[_Claim] = []
        self._pages: Intervals | None = None

    @classmethod
    def anonymous(cls, num_bytes: int) -> Arena:
        """An arena of private anonymous memory with room for `num_bytes`, as `bytes_for` counts them."""
        buffer = mmap.mmap(-1, num_bytes + START_ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        return cls(buffer)

    @staticmethod
    def bytes_for(sizes: list[tuple[int, bool]]) -> int:
        """Bytes that allocations of these sizes (and whether aligned) take with their guards.

        The arena's own start on a 2 MiB boundary is not counted; a buffer made by hand needs 2 MiB more for it.
        """
        each = (size + (START_ALIGNMENT if aligned else 0) for size, aligned in sizes)
        return GUARD_BYTES + sum(2 * ALLOCATOR_ALIGNMENT + size + GUARD_BYTES for size in each)

    def allocate(self, num_bytes: int, *, aligned: bool = True) -> Storage:
        """Take `num_bytes`. Aligned: 2 MiB more are allocated and `raw` starts on a 2 MiB boundary inside them.

        Not aligned: `raw` starts 512 bytes past a multiple of 1,024, so never on a 2 MiB boundary.
        """
        if num_bytes < 1:
            raise ValueError(f"an allocation needs at least 1 byte: found {num_bytes}; check the shapes and num_blocks")
        base = self.address + self._next
        base += (ALLOCATOR_ALIGNMENT - base) % (2 * ALLOCATOR_ALIGNMENT)
        total = num_bytes + (START_ALIGNMENT if aligned else 0)
        start = -(-base // START_ALIGNMENT) * START_ALIGNMENT if aligned else base
        offset = base - self.address
        if offset + total + GUARD_BYTES > self.num_bytes:
            raise ValueError(
                f"the arena is full: {num_bytes} bytes asked, {self.num_bytes - self._next} left, guards counted; "
                "make it with Arena.anonymous(Arena.bytes_for(sizes))"
            )
        self._next = offset + total + GUARD_BYTES
        # frombuffer gives each allocation a storage of its own, as separate allocations on a device have.
        storage = torch.frombuffer(self._buffer, dtype=torch.int8, count=total, offset=offset)
        return Storage(storage[start - base : start - base + num_bytes], start, num_bytes)

    def claim(self, label: str, starts: Offsets, size: int, kernel_blocks: int = 1) -> None:
        """Declare pages `[starts[i], starts[i] + size)` (addresses) as data; all other bytes stay guards.

        `kernel_blocks` pages in a row belong to one block of the manager, which is what reports name.
        """
        offsets = np.asarray(starts, np.int64) - self.address
        if len(offsets) == 0 or offsets.min() < 0 or offsets.max() + size > self.num_bytes:
            raise ValueError(f"{label} must have pages inside the arena: check its offsets, strides and num_blocks")
        self._claims.append(_Claim(label, offsets, size, kernel_blocks))
        self._pages = None

    def view(self, address: int, size: int) -> Bytes:
        """The bytes `[address, address + size)` in place, `(size,)` uint8."""
        offset = address - self.address
        if size < 0 or offset < 0 or offset + size > self.num_bytes:
            raise ValueError(
                f"[{address:#x}, {address + size:#x}) is not inside the arena "
                f"[{self.address:#x}, {self.address + self.num_bytes:#x})"
            )
        return self.memory[offset : offset + size]

    def pages(self) -> Intervals:
        """All claimed bytes as offsets, joined."""
        if self._pages is None:
            none = np.empty(0, np.int64)
            starts = np.concatenate([none, *(claim.starts for claim in self._claims)])
            ends = np.concatenate([none, *(claim.starts + claim.size for claim in self._claims)])
            self._pages = merge(starts, ends)
        return self._pages

    def poison(self, byte: int = POISON) -> None:
        """Fill every page of every component with one byte; guards stay."""
        for start, end in zip(*self.pages(), strict=True):
            self.memory[start:end] = byte

    def check_guards(self, limit: int = 16) -> list[Damage]:
        """Where a guard byte changed: the first `limit` runs, none when all is well."""
        starts, ends = complement(*self.pages(), 0, self.num_bytes)
        return self._compare(starts, ends, None, limit)

    def snapshot(self) -> Snapshot:
        """A copy of every byte, to compare with later."""
        return Snapshot(self)

    def _compare(self, starts: Offsets, ends: Offsets, before: Bytes | None, limit: int) -> list[Damage]:
        """Runs in the given ranges that differ from `before`, or from the guard byte where that is None."""
        damage: list[Damage] = []
        for low, high in zip(starts.tolist(), ends.tolist(), strict=True):
            for start in range(low, high, _STEP):
                end = min(start + _STEP, high)
                differs = self.memory[start:end] != (GUARD if before is None else before[start:end])
                if not differs.any():
                    continue
                for first, last in zip(*runs(np.flatnonzero(differs) + start), strict=True):
                    damage.append(self._damage(int(first), int(last)))
                    if len(damage) == limit:
                        return damage
        return damage

    def _damage(self, start: int, end: int) -> Damage:
        found = self.memory[start : min(end, start + 8)].tobytes()
        return Damage(self.address + start, start, end - start, found, self.nearest(self.address + start))

    def nearest(self, address: int) -> str:
        """The page at or next to an address, in words."""
        offset = address - self.address
        best: tuple[int, str] | None = None
        for claim in self._claims:
            distance = np.maximum(np.maximum(claim.starts - offset, offset - claim.starts - claim.size + 1), 0)
            i = int(distance.argmin())
            if best is None or distance[i] < best[0]:
                place = offset - int(claim.starts[i])
                side = (
                    f"{-place} bytes before"
                    if place < 0
                    else f"{place - claim.size} bytes after"
                    if place >= claim.size
                    else f"byte {place} of"
                )
                best = int(distance[i]), f"{side} {claim.label}, block {i // claim.kernel_blocks}"
        return "no page was claimed" if best is None else best[1]


class Snapshot:
    """The bytes of an arena at one moment."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._before = arena.memory.copy()

    def changed_outside(self, ranges: list[tuple[int, int]], limit: int = 16) -> list[Damage]:
        """The first `limit` runs of bytes that changed since, outside the given `(address, size)` ranges."""
        table = np.array(ranges, np.int64).reshape(-1, 2)
        starts = table[:, 0] - self._arena.address
        gaps = complement(starts, starts + table[:, 1], 0, self._arena.num_bytes)
        return self._arena._compare(*gaps, self._before, limit)
