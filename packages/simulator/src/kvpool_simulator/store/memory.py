"""A client's view of local memory: what is registered, what is mapped, and copies that never leave it."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right, insort
from collections.abc import Sequence
from enum import Enum
from operator import add
from typing import NamedTuple

from kvpool_simulator.store import codes
from kvpool_simulator.store.segment import SegmentMemory

SMALL_BYTES = 1 << 20
"""Pieces up to here are copied as slices, a third of the cost of a foreign call; that one releases Python's lock."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def mapped(address: int, num_bytes: int) -> bool:
    """Whether this process has memory there."""
    start = address - address % mmap.PAGESIZE
    length = address + num_bytes - start
    if start + length >= 1 << 63:
        return False
    residency = ctypes.create_string_buffer(length // mmap.PAGESIZE + 1)
    return bool(_libc.mincore(start, length, residency) == 0)


class Access(Enum):
    """Whether a transport may touch some memory."""

    OK = "ok"
    UNREGISTERED = "unregistered"
    UNMAPPED = "unmapped"


class Region(NamedTuple):
    """A registered region."""

    start: int
    end: int
    view: memoryview | None
    """Its bytes; None when there is no memory (registering what is not mapped succeeds)."""


class Reach(NamedTuple):
    """What a transport finds at some pieces of memory."""

    access: Access
    region: Region | None = None
    """The region that holds them all, if one does."""


class LocalMemory:
    """Registered regions of one client."""

    def __init__(self, strict: bool) -> None:
        """`strict`: only memory that lies whole inside a registered region may be touched."""
        self._strict = strict
        self._starts: list[int] = []
        self._regions: dict[int, Region] = {}

    def register(self, address: int, num_bytes: int) -> int:
        """`OK`, or `INVALID_PARAMS` for an empty, null or overlapping region."""
        end = address + num_bytes
        if num_bytes == 0 or address == 0:
            return codes.INVALID_PARAMS
        if any(region.start < end and address < region.end for region in self._regions.values()):
            return codes.INVALID_PARAMS
        view = None
        if mapped(address, num_bytes):
            view = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
        insort(self._starts, address)
        self._regions[address] = Region(address, end, view)
        return codes.OK

    def unregister(self, address: int) -> int:
        """`OK`, or `INVALID_PARAMS` for anything but a region's exact start."""
        if self._regions.pop(address, None) is None:
            return codes.INVALID_PARAMS
        self._starts.remove(address)
        return codes.OK

    def registered(self, address: int, num_bytes: int) -> bool:
        """Whether `[address, address + num_bytes)` lies inside one region."""
        return self._around(address, address + num_bytes) is not None

    def reach(self, addresses: Sequence[int], sizes: Sequence[int]) -> Reach:
        """What happens when the transport touches the pieces. Null and empty ones are never touched."""
        if addresses and len(addresses) == len(sizes):
            # Nearly always all pieces lie in one region.
            whole = self._around(min(addresses), max(map(add, addresses, sizes)))
            if whole is not None:
                return Reach(Access.OK, whole) if whole.view is not None else Reach(Access.UNMAPPED)
        for address, size in zip(addresses, sizes, strict=False):
            if not address or not size:
                continue
            region = self._around(address, address + size)
            if region is None and self._strict:
                return Reach(Access.UNREGISTERED)
            if region.view is None if region is not None else not mapped(address, size):
                return Reach(Access.UNMAPPED)
        return Reach(Access.OK)

    def _around(self, start: int, end: int) -> Region | None:
        """The region that `[start, end)` lies in."""
        at = bisect_right(self._starts, start) - 1
        region = self._regions[self._starts[at]] if at >= 0 else None
        return region if region is not None and end <= region.end else None


def gather(
    target: SegmentMemory, offset: int, addresses: Sequence[int], sizes: Sequence[int], region: Region | None
) -> None:
    """Copy pieces to consecutive bytes of a segment. Null pieces are skipped: what is there stays."""
    if region is not None and region.view is not None and max(sizes) <= SMALL_BYTES:
        to, source, base = target.view, region.view, region.start
        for address, size in zip(addresses, sizes, strict=False):
            start, end = address - base, offset + size
            to[offset:end] = source[start : start + size]
            offset = end
        return
    move, at = ctypes.memmove, target.address + offset
    for address, size in zip(addresses, sizes, strict=False):
        if address:
            move(at, address, size)
        at += size


def scatter(
    source: SegmentMemory, offset: int, addresses: Sequence[int], sizes: Sequence[int], region: Region | None
) -> None:
    """Copy consecutive bytes of a segment to pieces. Null pieces are skipped."""
    if region is not None and region.view is not None and max(sizes) <= SMALL_BYTES:
        to, view, base = region.view, source.view, region.start
        for address, size in zip(addresses, sizes, strict=False):
            start, end = address - base, offset + size
            to[start : start + size] = view[offset:end]
            offset = end
        return
    move, at = ctypes.memmove, source.address + offset
    for address, size in zip(addresses, sizes, strict=False):
        if address:
            move(address, at, size)
        at += size
