"""`MooncakeDistributedStore`, simulated: Mooncake's names, arguments and return codes."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from kvpool_simulator.store import codes
from kvpool_simulator.store.codes import WouldCrashError
from kvpool_simulator.store.master import Lookup, Replica
from kvpool_simulator.store.memory import LocalMemory, gather, scatter
from kvpool_simulator.store.options import ReplicateConfig
from kvpool_simulator.store.service import ServiceError, find_service
from kvpool_simulator.store.space import SegmentMemory

MIN_SEGMENT_BYTES = 16 << 20
MAX_SLICES = 2048
"""Pieces in flight over TCP; keys beyond fail."""

_names = itertools.count(1)
Pieces = Sequence[Sequence[int]]


class MooncakeDistributedStore:
    """One client of a simulated master.

    What would crash a process with the real store raises `WouldCrashError`: most calls before `setup` and after
    `close`, and unmapped local memory.
    """

    def __init__(self) -> None:
        self._service: Any = None
        self._segment: SegmentMemory | None = None
        self._client = 0
        self._name = ""
        self._memory = LocalMemory(strict=True)
        self._limited = False
        self._buffer_bytes = 0
        self._mapped: dict[str, SegmentMemory] = {}
        self._open_puts: dict[str, tuple[Replica, ...]] = {}
        self._open_gets: dict[str, Lookup] = {}

    # Life

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int = 16 << 20,
        local_buffer_size: int = 16 << 20,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "127.0.0.1:50051",
        engine: object = None,
    ) -> int:
        """Join a master and give it a segment: 0, -1 when no master answers, -600 for a segment that is too small."""
        if global_segment_size < 0 or local_buffer_size < 0:
            raise TypeError("sizes are not negative")
        if 0 < global_segment_size < MIN_SEGMENT_BYTES:
            return codes.INVALID_PARAMS
        self.close()
        try:
            service = find_service(master_server_addr)
            self._client = service.new_client()
            profile = service.get_profile()
        except OSError:
            return codes.SETUP_FAIL
        self._name = f"{local_hostname}:{10_000 + next(_names)}-{self._client}"
        self._memory = LocalMemory(strict=profile == "strict")
        self._limited = profile == "tcp"
        self._buffer_bytes = local_buffer_size
        try:
            if global_segment_size:
                self._segment = SegmentMemory(global_segment_size)
                service.call("mount", self._name, self._client, self._segment.path, global_segment_size)
        except ServiceError:
            return codes.SETUP_FAIL
        self._service = service
        return codes.OK

    def close(self) -> int:
        """Leave: this client's segment and what lies in it are gone. Idempotent."""
        service, self._service = self._service, None
        if service is not None:
            # A master that is down forgets the segment anyway.
            with contextlib.suppress(ServiceError, OSError, EOFError):
                service.call("unmount", self._client)
        for memory in (*self._mapped.values(), self._segment):
            if memory is not None:
                memory.close()
        self._mapped.clear()
        self._segment = None
        self._open_puts.clear()
        self._open_gets.clear()
        return codes.OK

    def health_check(self) -> int:
        """0 well, 1 not set up, 2 no master."""
        if self._service is None:
            return 1
        return 0 if self._ask("keys", failed=None) is not None else 2

    def get_hostname(self) -> str:
        """The name of this client and of its segment."""
        self._started("get_hostname")
        return self._name

    def register_buffer(self, address: int, size: int) -> int:
        """0, or -600."""
        self._started("register_buffer")
        if size < 0:
            raise TypeError("sizes are not negative")
        return self._memory.register(address, size)

    def unregister_buffer(self, address: int) -> int:
        """0, or -600."""
        self._started("unregister_buffer")
        return self._memory.unregister(address)

    # Presence

    def is_exist(self, key: str) -> int:
        """1, 0 or a code."""
        return int(self.batch_is_exist([key])[0])

    def batch_is_exist(self, keys: list[str]) -> Any:
        """1, 0 or a code for each key; grants leases."""
        self._started("batch_is_exist")
        return self._faulty("batch_is_exist", keys, lambda: [self._ask("exist", key) for key in keys])

    def get_size(self, key: str) -> int:
        """Bytes, or a code; grants a lease."""
        self._started("get_size")
        found = self._query(key)
        return found.num_bytes if found.code == codes.OK else found.code

    # Whole objects

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: Pieces, sizes: Pieces, config: ReplicateConfig | None = None
    ) -> Any:
        """0 or a code for each key. A key that exists, or that another is writing, gives 0 and changes nothing."""
        if self._service is None:
            return []
        return self._faulty(
            "batch_put_from_multi_buffers",
            keys,
            lambda: self._put_all(keys, addresses, sizes, config or ReplicateConfig()),
        )

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: Pieces, sizes: Pieces, prefer_alloc_in_same_node: bool = False
    ) -> Any:
        """The object's bytes or a code for each key. Of a key named twice only the last destination is filled."""
        self._started("batch_get_into_multi_buffers")
        return self._faulty(
            "batch_get_into_multi_buffers", keys, lambda: self._get_all(keys, addresses, sizes, exact=True)
        )

    def batch_put_from(
        self, keys: list[str], addresses: Sequence[int], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> Any:
        """The same with one piece a key."""
        self._started("batch_put_from")
        pieces = [[address] for address in addresses], [[size] for size in sizes]
        return self._faulty("batch_put_from", keys, lambda: self._put_all(keys, *pieces, config or ReplicateConfig()))

    def batch_get_into(self, keys: list[str], addresses: Sequence[int], sizes: Sequence[int]) -> Any:
        """The same with one piece a key; a destination may be larger than the object."""
        self._started("batch_get_into")
        pieces = [[address] for address in addresses], [[size] for size in sizes]
        return self._faulty("batch_get_into", keys, lambda: self._get_all(keys, *pieces, exact=False))

    def put_from(self, key: str, address: int, size: int, config: ReplicateConfig | None = None) -> int:
        """0 or a code."""
        return int(self.batch_put_from([key], [address], [size], config)[0])

    def get_into(self, key: str, address: int, size: int) -> int:
        """Bytes or a code."""
        return int(self.batch_get_into([key], [address], [size])[0])

    def put(self, key: str, value: bytes, config: ReplicateConfig | None = None) -> int:
        """0 or a code. The value passes through Mooncake's own buffer, so one must have been asked for."""
        self._started("put")
        if not value or not self._buffer_bytes:
            return codes.INVALID_PARAMS
        source = ctypes.create_string_buffer(value, len(value))
        return self._put(key, [ctypes.addressof(source)], [len(value)], config or ReplicateConfig())

    def get(self, key: str) -> bytes:
        """The object, or nothing."""
        if self._service is None:
            return b""
        found = self._query(key)
        if found.code != codes.OK or not found.replicas[0].owner_alive:
            return b""
        target = ctypes.create_string_buffer(found.num_bytes)
        scatter(self._address(found.replicas[0]), [ctypes.addressof(target)], [found.num_bytes])
        return target.raw

    def upsert_from(self, key: str, address: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Insert or replace, leased or not: 0 or a code."""
        return self.batch_upsert_from([key], [address], [size], config)[0]

    def batch_upsert_from(
        self, keys: list[str], addresses: Sequence[int], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """The same for several keys; of a key named twice the first value stays."""
        self._started("batch_upsert_from")
        results: dict[str, int] = {}
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            if size and key not in results:
                self._ask("make_way", key)
            if key not in results:
                results[key] = self._put(key, [address], [size], config or ReplicateConfig())
        return [results[key] for key in keys]

    # Layer by layer

    def batch_put_session_start(
        self, keys: list[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Reserve objects: 0, -705 for one that exists or is being written, or a code."""
        if self._service is None:
            return []
        results = []
        for key, size in zip(keys, sizes, strict=True):
            if key in self._open_puts:
                results.append(codes.OBJECT_ALREADY_EXISTS if keys.count(key) > 1 else codes.INVALID_PARAMS)
                continue
            started = self._ask("put_start", key, size, self._client, config or ReplicateConfig())
            code, replicas = started if isinstance(started, tuple) else (started, ())
            if code == codes.OK:
                self._open_puts[key] = replicas
            results.append(code)
        return results

    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: Pieces, sizes: Pieces, offsets: Pieces
    ) -> list[int]:
        """Write parts of open objects: bytes written or a code for each key."""
        self._started("batch_put_from_multi_buffer_ranges")
        return [
            self._ranges(self._open_puts.get(key), *pieces, write=True)
            for key, *pieces in zip(keys, addresses, sizes, offsets, strict=True)
        ]

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        """Make objects visible, whole or not: that is the caller's to know."""
        return [self._end_put(key, "put_end") for key in keys] if self._service else []

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        """Give objects up."""
        return [self._end_put(key, "put_revoke") for key in keys] if self._service else []

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        """Open objects for reading; each holds its lease from here."""
        if self._service is None:
            return []
        results = []
        for key in keys:
            found = self._query(key)
            if found.code == codes.OK:
                self._open_gets[key] = found
            results.append(found.code)
        return results

    def batch_get_into_multi_buffer_ranges(
        self, keys: list[str], addresses: Pieces, sizes: Pieces, offsets: Pieces
    ) -> list[int]:
        """Read parts of open objects: bytes read or a code for each key; -707 once the lease has run out."""
        self._started("batch_get_into_multi_buffer_ranges")
        results = []
        for key, *pieces in zip(keys, addresses, sizes, offsets, strict=True):
            found = self._open_gets.get(key)
            if found is not None and self._now() >= found.lease_end:
                del self._open_gets[key]
                results.append(codes.LEASE_EXPIRED)
                continue
            results.append(self._ranges(found.replicas if found else None, *pieces, write=False))
        return results

    def batch_get_session_end(self, keys: list[str]) -> int:
        """0, also for what was not open; -1 before setup."""
        if self._service is None:
            return codes.SETUP_FAIL
        for key in keys:
            self._open_gets.pop(key, None)
        return codes.OK

    # Removing

    def remove(self, key: str, force: bool = False) -> int:
        """0 or a code."""
        return int(self.batch_remove([key], force)[0])

    def batch_remove(self, keys: list[str], force: bool = False) -> Any:
        """0 or a code for each key."""
        self._started("batch_remove")
        return self._faulty("batch_remove", keys, lambda: [self._ask("remove", key, force) for key in keys])

    def remove_all(self, force: bool = False) -> int:
        """The number removed, or a code."""
        return self.remove_by_regex("", force)

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        """The number removed of keys that the pattern is found in, or a code."""
        self._started("remove_by_regex")
        return int(self._ask("remove_matching", pattern, force))

    # Inside

    def _started(self, call: str) -> None:
        if self._service is None:
            raise WouldCrashError(f"{call} before setup() or after close()")

    def _ask(self, name: str, *arguments: Any, failed: Any = ...) -> Any:
        """Call the master; `failed`, or the code of the failure, when it does not answer."""
        try:
            return self._service.call(name, *arguments)
        except ServiceError as error:
            return error.code if failed is ... else failed

    def _faulty(self, call: str, keys: Sequence[str], do: Callable[[], Any]) -> Any:
        injected = self._service.inject(call, list(keys))
        return do() if injected is None else injected

    def _query(self, key: str) -> Lookup:
        found = self._ask("query", key)
        return found if isinstance(found, Lookup) else Lookup(found)

    def _now(self) -> float:
        return float(self._service.call("now"))

    def _address(self, replica: Replica) -> int:
        if replica.path not in self._mapped:
            self._mapped[replica.path] = SegmentMemory(replica.capacity, replica.path)
        return self._mapped[replica.path].address + replica.offset

    def _put_all(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, config: ReplicateConfig) -> list[int]:
        if not len(keys) == len(addresses) == len(sizes) or any(
            len(a) != len(s) for a, s in zip(addresses, sizes, strict=True)
        ):
            return [codes.INVALID_PARAMS] * len(keys)
        results, slices = [], 0
        for key, pointers, lengths in zip(keys, addresses, sizes, strict=True):
            slices += len(pointers)
            if self._limited and slices > MAX_SLICES:
                results.append(codes.TRANSFER_FAIL)
            else:
                results.append(self._put(key, pointers, lengths, config))
        return results

    def _put(self, key: str, addresses: Sequence[int], sizes: Sequence[int], config: ReplicateConfig) -> int:
        if any(size < 0 for size in sizes):
            raise TypeError("sizes are not negative")
        started = self._ask("put_start", key, sum(sizes), self._client, config)
        if not isinstance(started, tuple):
            return int(started)
        code, replicas = started
        if code == codes.OBJECT_ALREADY_EXISTS:
            return codes.OK
        if code != codes.OK:
            return int(code)
        if not self._memory.reachable(addresses, sizes) or not all(replica.owner_alive for replica in replicas):
            self._ask("put_revoke", key, self._client)
            return codes.TRANSFER_FAIL
        for replica in replicas:
            gather(self._address(replica), addresses, sizes)
        return int(self._ask("put_end", key, self._client))

    def _get_all(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, exact: bool) -> list[int]:
        if not len(keys) == len(addresses) == len(sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        last = {key: i for i, key in enumerate(keys)}
        results, slices = [], 0
        for i, (key, pointers, lengths) in enumerate(zip(keys, addresses, sizes, strict=True)):
            slices += len(pointers)
            if self._limited and slices > MAX_SLICES:
                results.append(codes.TRANSFER_FAIL)
            else:
                results.append(self._get(key, pointers, lengths, exact, fill=last[key] == i))
        return results

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int], exact: bool, fill: bool) -> int:
        found = self._query(key)
        if found.code != codes.OK:
            return found.code
        total = sum(sizes)
        if total < found.num_bytes:
            return codes.INVALID_PARAMS
        if total > found.num_bytes and exact:
            return codes.TRANSFER_FAIL
        replica = next((replica for replica in found.replicas if replica.owner_alive), None)
        sizes = list(sizes) if exact else [found.num_bytes]
        if replica is None or not self._memory.reachable(addresses, sizes):
            return codes.TRANSFER_FAIL
        if fill:
            scatter(self._address(replica), addresses, sizes)
        return found.num_bytes

    def _ranges(
        self,
        replicas: tuple[Replica, ...] | None,
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
        *,
        write: bool,
    ) -> int:
        if replicas is None or not len(addresses) == len(sizes) == len(offsets):
            return codes.INVALID_PARAMS
        if any(offset + size > replicas[0].num_bytes for offset, size in zip(offsets, sizes, strict=True)):
            return codes.INVALID_PARAMS
        if not self._memory.reachable(addresses, sizes) or not replicas[0].owner_alive:
            return codes.TRANSFER_FAIL
        for replica in replicas if write else replicas[:1]:
            start = self._address(replica)
            for address, size, offset in zip(addresses, sizes, offsets, strict=True):
                if write:
                    gather(start + offset, [address], [size])
                else:
                    scatter(start + offset, [address], [size])
        return sum(sizes)

    def _end_put(self, key: str, call: str) -> int:
        if key not in self._open_puts:
            return codes.INVALID_PARAMS
        code = int(self._ask(call, key, self._client))
        # A session whose key another client took stays stuck, as measured; -704 is cleared by a revoke.
        if code == codes.OK or (call == "put_revoke" and code == codes.OBJECT_NOT_FOUND):
            del self._open_puts[key]
        return codes.OK if call == "put_revoke" and code == codes.OBJECT_NOT_FOUND else code
