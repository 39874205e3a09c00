"""A store in a dict, for unit tests: real bytes at real addresses, broken on demand."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces


class DictStore:
    """Objects in a dict. `answers[call]` replaces what a call returns; `gates[call]` is waited for before it runs."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, list[str]]] = []
        self.answers: dict[str, Callable[[Sequence[str]], list[Status]]] = {}
        self.gates: dict[str, threading.Event] = {}
        self.entered: dict[str, threading.Event] = {name: threading.Event() for name in ("exist", "put", "get")}
        self.closed = False

    def _enter(self, call: str, keys: Sequence[str]) -> list[Status] | None:
        self.calls.append((call, list(keys)))
        self.entered[call].set()
        if call in self.gates:
            assert self.gates[call].wait(30), "the test never opened the gate"
        return self.answers[call](keys) if call in self.answers else None

    def register(self, address: int, num_bytes: int) -> Status:
        return Status.OK

    def unregister(self, address: int) -> Status:
        return Status.OK

    def exist(self, keys: Sequence[str]) -> list[Status]:
        answer = self._enter("exist", keys)
        if answer is not None:
            return answer
        return [Status.OK if key in self.objects else Status.MISS for key in keys]

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        answer = self._enter("put", keys)
        if answer is not None:
            return answer
        for key, pieces, lengths in zip(keys, addresses, sizes, strict=True):
            value = b"".join(ctypes.string_at(a, n) for a, n in zip(pieces, lengths, strict=True))
            self.objects.setdefault(key, value)
        return [Status.OK] * len(keys)

    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        answer = self._enter("get", keys)
        if answer is not None:
            return answer
        return [self._get(*one) for one in zip(keys, addresses, sizes, strict=True)]

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> Status:
        value = self.objects.get(key)
        if value is None:
            return Status.MISS
        if len(value) != sum(sizes):
            return Status.CORRUPT
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, value[:size], size)
            value = value[size:]
        return Status.OK

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return [Status.OK if self.objects.pop(key, None) is not None else Status.MISS for key in keys]

    def write(self, key: str, value: bytes, *, pinned: bool = False) -> Status:
        self.objects.setdefault(key, value)
        return Status.OK

    def read(self, key: str) -> tuple[Status, bytes]:
        return (Status.OK, self.objects[key]) if key in self.objects else (Status.MISS, b"")

    def close(self) -> None:
        self.closed = True
