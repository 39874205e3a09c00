"""Objects as Python's bytes. They pass through the store's own buffer, whose size `setup` was told."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from kvpool_simulator.store import codes
from kvpool_simulator.store.arguments import contents, sequence, text, texts
from kvpool_simulator.store.calls import call
from kvpool_simulator.store.descriptors import BufferHandle, buffer_handle
from kvpool_simulator.store.options import ReplicateConfig
from kvpool_simulator.store.transfers import DEFAULT_CONFIG, Transfers, checked


class Values(Transfers):
    """Puts and gets by value."""

    @call()
    def put(self, key: str, value: Any, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """0 or a code. Of an array of items of several bytes only the first `len(array)` *bytes* are stored."""
        return self._put_values([text(key)], [contents(value)], checked(config))

    @call()
    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """The same for a value in parts; 0 too for no bytes, which stores nothing."""
        return self._put_parts(key, parts, config, upsert=False)

    @call()
    def put_batch(self, keys: list[str], values: Sequence[Any], config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """0, or the first key's code that is not; nothing is stored when a value is empty."""
        return self._put_values(texts(keys), [contents(value) for value in sequence(values)], checked(config))

    @call(lambda *_, **__: codes.INVALID_PARAMS)
    def upsert(self, key: str, value: Any, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """Insert or replace: 0 or a code."""
        return self._put_values([text(key)], [contents(value)], checked(config), upsert=True)

    @call(lambda *_, **__: codes.INVALID_PARAMS)
    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """The same for a value in parts."""
        return self._put_parts(key, parts, config, upsert=True)

    @call(lambda *_, **__: codes.INVALID_PARAMS)
    def upsert_batch(self, keys: list[str], values: Sequence[Any], config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """The same for several keys."""
        return self._put_values(
            texts(keys), [contents(value) for value in sequence(values)], checked(config), upsert=True
        )

    @call(lambda *_, **__: b"")
    def get(self, key: str, /) -> bytes:
        """The object; nothing for what cannot be read or does not fit the buffer."""
        (value,) = self._get_values([text(key)])
        return bytes(value or b"")

    @call(lambda *_, **__: [b""])
    def get_batch(self, keys: list[str], /) -> list[bytes]:
        """The objects. Of a key named twice only the last is filled, the others hold what was in the buffer."""
        return [bytes(value or b"") for value in self._get_values(texts(keys))] or [b""]

    @call()
    def get_buffer(self, key: str, /) -> BufferHandle | None:
        """The object in the store's buffer, or None."""
        return self._get_handles([text(key)])[0]

    @call()
    def batch_get_buffer(self, keys: list[str], /) -> list[BufferHandle | None]:
        """The same for several keys."""
        return self._get_handles(texts(keys))

    # Inside

    def _put_parts(self, key: str, parts: Sequence[Any], config: ReplicateConfig, *, upsert: bool) -> int:
        value = b"".join(contents(part) for part in parts)
        name = text(key)
        return self._put_values([name], [value], checked(config), upsert=upsert) if value else codes.OK

    def _put_values(
        self, keys: list[str], values: Sequence[bytes], config: ReplicateConfig, *, upsert: bool = False
    ) -> int:
        if len(keys) != len(values) or not all(values) or config.prefer_alloc_in_same_node:
            return codes.INVALID_PARAMS
        if sum(map(len, values)) > self._buffer_bytes:
            return codes.INVALID_PARAMS
        sources = [ctypes.create_string_buffer(value, len(value)) for value in values]
        addresses, sizes = [[ctypes.addressof(one)] for one in sources], [[len(one)] for one in sources]
        results = self._put_all(keys, addresses, sizes, config, upsert=upsert, foreign=False)
        return next((code for code in results if code != codes.OK), codes.OK)

    def _get_values(self, keys: list[str]) -> list[bytearray | None]:
        found = self._query(keys)
        room, targets = self._buffer_bytes, []
        for one in found:
            fits = one.code == codes.OK and one.num_bytes <= room
            room -= one.num_bytes if fits else 0
            targets.append(bytearray(one.num_bytes) if fits else None)
        asked = [i for i, target in enumerate(targets) if target is not None]
        buffers = [(ctypes.c_char * len(t)).from_buffer(t) for t in targets if t is not None]
        addresses, sizes = [[ctypes.addressof(one)] for one in buffers], [[len(one)] for one in buffers]
        results = self._get_all([keys[i] for i in asked], addresses, sizes, exact=True, foreign=False)
        for i, code in zip(asked, results, strict=True):
            if code < 0:
                targets[i] = None
        return targets

    def _get_handles(self, keys: list[str]) -> list[BufferHandle | None]:
        return [None if value is None else buffer_handle(value) for value in self._get_values(keys)]
