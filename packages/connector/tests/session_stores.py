"""A dict store with sessions: open objects, ranges, and a record of what was asked when."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from stores import DictStore

from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces


class SessionDictStore(DictStore):
    """`answers` and `gates` as in `DictStore`; `range_gates[offset]` and `range_faults[key, offset]` go by range."""

    def __init__(self) -> None:
        super().__init__()
        self.open_puts: dict[str, bytearray] = {}
        self.open_gets: set[str] = set()
        self.range_gates: dict[int, threading.Event] = {}
        self.range_faults: dict[tuple[str, int], Status] = {}
        self.asked: list[tuple[str, int]] = []
        """Call and offset of every range."""
        self.begun_gets: list[list[str]] = []
        self.revoked: list[str] = []
        self.end_answers: Callable[[str], Status] | None = None

    def begin_put(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Status]:
        statuses = []
        for key, size in zip(keys, sizes, strict=True):
            if key in self.objects or key in self.open_puts:
                statuses.append(Status.EXISTS)
                continue
            self.open_puts[key] = bytearray(size)
            statuses.append(Status.OK)
        return statuses

    def put_ranges(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, offsets: Pieces) -> list[Status]:
        def move(key: str, address: int, size: int, offset: int) -> None:
            self.open_puts[key][offset : offset + size] = ctypes.string_at(address, size)

        return self._ranges("put", self.open_puts, move, keys, addresses, sizes, offsets)

    def end_put(self, keys: Sequence[str]) -> list[Status]:
        if self.end_answers is not None:
            return [self.end_answers(key) for key in keys]
        for key in keys:
            self.objects[key] = bytes(self.open_puts.pop(key))
        return [Status.OK] * len(keys)

    def revoke_put(self, keys: Sequence[str]) -> list[Status]:
        self.revoked += keys
        return [Status.OK if self.open_puts.pop(key, None) is not None else Status.INVALID for key in keys]

    def begin_get(self, keys: Sequence[str]) -> list[Status]:
        self.begun_gets.append(list(keys))
        self.open_gets.update(key for key in keys if key in self.objects)
        return [Status.OK if key in self.objects else Status.MISS for key in keys]

    def get_ranges(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, offsets: Pieces) -> list[Status]:
        def move(key: str, address: int, size: int, offset: int) -> None:
            ctypes.memmove(address, self.objects[key][offset : offset + size], size)

        return self._ranges("get", self.open_gets, move, keys, addresses, sizes, offsets)

    def end_get(self, keys: Sequence[str]) -> None:
        self.open_gets.difference_update(keys)

    def _ranges(
        self,
        call: str,
        known: dict[str, bytearray] | set[str],
        move: Callable[[str, int, int, int], None],
        keys: Sequence[str],
        addresses: Pieces,
        sizes: Pieces,
        offsets: Pieces,
    ) -> list[Status]:
        (offset,) = {offset for row in offsets for offset in row}
        self.asked.append((call, offset))
        if offset in self.range_gates:
            assert self.range_gates[offset].wait(30), "the test never opened the gate"
        statuses = []
        for key, (address,), (size,) in zip(keys, addresses, sizes, strict=True):
            status = self.range_faults.get((key, offset), Status.OK if key in known else Status.INVALID)
            if status.ok:
                move(key, address, size, offset)
            statuses.append(status)
        return statuses
