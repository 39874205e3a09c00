"""A store lent to one node after another: opening a client for each would take seconds."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_connector.contract.layout import Region
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import CacheStore, Pieces, SessionStore


class Borrowed:
    """A store whose `close` gives back what was registered through it and leaves the store open."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._registered: list[int] = []

    def register(self, address: int, num_bytes: int) -> Status:
        status = self._store.register(address, num_bytes)
        if status.ok:
            self._registered.append(address)
        return status

    def unregister(self, address: int) -> Status:
        if address in self._registered:
            self._registered.remove(address)
        return self._store.unregister(address)

    def register_shared(self, regions: Sequence[Region]) -> bool:
        return isinstance(self._store, CacheStore) and self._store.register_shared(regions)

    def exist(self, keys: Sequence[str]) -> list[Status]:
        return self._store.exist(keys)

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return self._store.put(keys, addresses, sizes)

    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return self._store.get(keys, addresses, sizes)

    def begin_put(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Status]:
        return self._store.begin_put(keys, sizes)

    def put_ranges(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, offsets: Pieces) -> list[Status]:
        return self._store.put_ranges(keys, addresses, sizes, offsets)

    def end_put(self, keys: Sequence[str]) -> list[Status]:
        return self._store.end_put(keys)

    def revoke_put(self, keys: Sequence[str]) -> list[Status]:
        return self._store.revoke_put(keys)

    def begin_get(self, keys: Sequence[str]) -> list[Status]:
        return self._store.begin_get(keys)

    def get_ranges(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, offsets: Pieces) -> list[Status]:
        return self._store.get_ranges(keys, addresses, sizes, offsets)

    def end_get(self, keys: Sequence[str]) -> None:
        self._store.end_get(keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return self._store.remove(keys, force=force)

    def write(self, key: str, value: bytes, *, pinned: bool = False) -> Status:
        return self._store.write(key, value, pinned=pinned)

    def read(self, key: str) -> tuple[Status, bytes]:
        return self._store.read(key)

    def close(self) -> None:
        for address in self._registered[:]:
            self.unregister(address)
