"""A client's view of local memory: what is registered, and copies that never leave it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvpool_simulator.store import codes
from kvpool_simulator.store.codes import WouldCrashError

FIRST_MAPPED = 1 << 16
"""No process maps memory below this."""


class LocalMemory:
    """Registered regions of one client."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._regions: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> int:
        """`OK`, or `INVALID_PARAMS` for an empty, null or overlapping region."""
        overlap = any(start < address + num_bytes and address < start + size for start, size in self._regions.items())
        if num_bytes == 0 or address == 0 or overlap:
            return codes.INVALID_PARAMS
        self._regions[address] = num_bytes
        return codes.OK

    def unregister(self, address: int) -> int:
        """`OK`, or `INVALID_PARAMS` for anything but a region's exact start."""
        return codes.OK if self._regions.pop(address, None) is not None else codes.INVALID_PARAMS

    def reachable(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether the transport may touch the pieces. Raises `WouldCrashError` for memory that cannot be there."""
        for address, size in zip(addresses, sizes, strict=True):
            if 0 < address < FIRST_MAPPED and size:
                raise WouldCrashError(f"{size} bytes at the unmapped address {address:#x}")
        if not self._strict:
            return True
        return all(
            any(start <= address and address + size <= start + length for start, length in self._regions.items())
            for address, size in zip(addresses, sizes, strict=True)
            if size
        )


def gather(target: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy pieces to consecutive bytes at `target`. Null pieces are skipped: their content is undefined."""
    move = ctypes.memmove
    for address, size in zip(addresses, sizes, strict=True):
        if address:
            move(target, address, size)
        target += size


def scatter(source: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Copy consecutive bytes at `source` to pieces. Null pieces are skipped."""
    move = ctypes.memmove
    for address, size in zip(addresses, sizes, strict=True):
        if address:
            move(address, source, size)
        source += size
