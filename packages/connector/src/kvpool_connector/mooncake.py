"""Mooncake Store as a `kvpool_connector.contract.store.Store`. The only file that imports mooncake.

Facts are of mooncake-transfer-engine 0.3.13.post1. Calls before `setup` and after `close` crash Mooncake's process, so
they are guarded here.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Protocol, TypeGuard

from kvpool_connector.config import DEFAULT_TENANT, PoolSettings, StoreSettings
from kvpool_connector.contract.errors import StoreClosedError, StoreSetupError
from kvpool_connector.contract.layout import REGION_ALIGNMENT, Region
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces

logger = logging.getLogger(__name__)

DEBIAN_PACKAGES = "libibverbs1 librdmacm1 libnuma1 liburing2"

STATUS_OF_CODE: dict[int, Status] = {
    0: Status.OK,
    -200: Status.NO_SPACE,
    -400: Status.INVALID,
    -600: Status.INVALID,
    -601: Status.NOT_READY,
    -703: Status.NOT_READY,
    -704: Status.MISS,
    -705: Status.EXISTS,
    -706: Status.LEASED,
    -707: Status.LEASE_EXPIRED,
    -714: Status.LEASED,
    -800: Status.UNAVAILABLE,
    -801: Status.CORRUPT,
    -900: Status.UNAVAILABLE,
    -901: Status.TIMEOUT,
}
"""Mooncake's return codes. What is not listed is `UNAVAILABLE`."""

STATUS_OF_EXIST = STATUS_OF_CODE | {1: Status.OK, 0: Status.MISS}

TRANSPORT_LIMITS: dict[str, str] = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "10",
    "MC_TCP_STATUS_TIMEOUT_SEC": "10",
}
"""Bounds of Mooncake's own waits (30 to 90 s by default), set before it is imported unless the user set them."""


MAX_CACHE_REGIONS = 256 - 8
"""Of the 256 regions that a process may register with the protocol `ascend` (vLLM-Ascend, `kv_transfer/utils/utils.py`)
eight are kept for the segment, the staging area, values on the host, and other connectors."""


class SharedEngine(Protocol):
    """The one transfer engine of a process, which vLLM-Ascend's own connectors use too (its `global_te`)."""

    def get_transfer_engine(self, hostname: str, device_name: str | None) -> Any:
        """The engine, made by whoever asks first."""
        ...

    def register_buffer(self, ptrs: list[int], sizes: list[int]) -> None:
        """Register the KV cache, unless somebody has. Raises `RuntimeError`."""
        ...


def memory_to_lock(settings: StoreSettings) -> int:
    """Bytes of host memory that the transport locks in place for this process."""
    if settings.protocol == "tcp" or settings.fabric_memory:
        return 0
    return settings.global_segment_size + settings.local_buffer_size


def locked_memory_shortage(settings: StoreSettings) -> str:
    """In words how far the limit on locked memory lies below what the transport locks; empty where it does not."""
    needed, limit = memory_to_lock(settings), resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    return (
        f"the limit on locked memory is {limit} bytes, and {needed} are to be registered (global_segment_size + "
        "local_buffer_size); raise it: `ulimit -l unlimited`, in containers `--ulimit memlock=-1`"
    )


def import_mooncake() -> Any:
    """The module `mooncake.store`. Raises `StoreSetupError` with the remedy where it cannot be had."""
    for name, value in TRANSPORT_LIMITS.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreSetupError(
            f"mooncake.store cannot be imported ({error}). Install it with `pip install kvpool-connector[mooncake]`, "
            f"and its system libraries with `apt-get install {DEBIAN_PACKAGES}`"
        ) from error


class MooncakeStore:
    """One client of a Mooncake master."""

    def __init__(
        self,
        settings: StoreSettings,
        pool: PoolSettings | None = None,
        module: Any = None,
        bind_thread: Callable[[], None] = lambda: None,
        engine: SharedEngine | None = None,
    ) -> None:
        """`module` is for drop-ins of `mooncake.store`; by default Mooncake's own.

        `bind_thread` lets the calling thread use the device, without which protocol `ascend` cannot copy; it is called
        in every thread that calls. `engine`: the process's, where there is one; by default Mooncake makes its own.
        """
        self._settings = settings
        self._pool = pool or PoolSettings()
        self._module = module
        self._bind_thread = bind_thread
        self._engine = None if settings.fabric_memory else engine
        self._client: Any = None
        self._placement: Any = None
        self._pinned: Any = None

    def connect(self) -> None:
        """Reach the master and give it this process's memory.

        Raises `StoreSetupError` within `setup_timeout_s`; Mooncake's own set-up tries for 90 s.
        """
        settings, limit = self._settings, self._pool.setup_timeout_s
        module = self._module or import_mooncake()
        client = module.MooncakeDistributedStore()
        if self._module is None:
            self._probe_master(limit)
        shortage = locked_memory_shortage(settings)
        if shortage:
            logger.warning("event=locked_memory: %s", shortage)
        host = settings.local_hostname or self._own_address()
        outcome: list[object] = []

        def set_up() -> None:
            try:
                self._bind_thread()
                outcome.append(self._set_up(client, host))
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=set_up, name="kvpool-setup", daemon=True)
        thread.start()
        thread.join(limit)
        if outcome != [0]:
            found = f"returned {outcome[0]!r}" if outcome else f"did not return within {limit:g} s"
            raise StoreSetupError(
                f"Mooncake's setup {found} (master {settings.master_server_address}, protocol {settings.protocol!r}, "
                f"segment {settings.global_segment_size} bytes). Check that the master runs, that this build of "
                f"Mooncake has the protocol, and that the machine has the memory{shortage and '; ' + shortage}"
            )
        self._client = client
        self._placement = module.ReplicateConfig()
        self._placement.prefer_alloc_in_same_node = settings.prefer_alloc_in_same_node
        self._pinned = module.ReplicateConfig()
        self._pinned.with_hard_pin = True
        if settings.preferred_segment and settings.global_segment_size:
            self._placement.preferred_segment = client.get_hostname()

    @property
    def address(self) -> str:
        """`host:port` by which other clients find this one. Only after `connect`."""
        return str(self._client.get_hostname())

    def _set_up(self, client: Any, host: str) -> int:
        """Mooncake's code; 0 is well."""
        settings = self._settings
        # Only for those who have one: it is younger than the other arguments.
        more = {} if settings.tenant_id == DEFAULT_TENANT else {"tenant_id": settings.tenant_id}
        if self._engine is not None:
            engine = self._engine.get_transfer_engine(host, device_name=None)
            host = f"{host}:{engine.get_rpc_port()}"
            more["engine"] = engine.get_engine()
        code: int = client.setup(
            host,
            settings.metadata_server,
            settings.global_segment_size,
            0 if settings.fabric_memory else settings.local_buffer_size,
            settings.protocol,
            settings.device_name,
            settings.master_server_address,
            **more,
        )
        return code

    def _own_address(self) -> str:
        """The address of this machine on the way to the master: where other clients of that master reach it too."""
        host, port = self._master()
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # of a datagram socket: chooses the way, sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise StoreSetupError(
                f"no way to the Mooncake master {self._settings.master_server_address} ({error}); correct "
                "master_server_address, or set local_hostname to this machine's address"
            ) from error

    def _master(self) -> tuple[str, int]:
        host, _, port = self._settings.master_server_address.rpartition(":")
        return host.strip("[]"), int(port)

    def _probe_master(self, limit: float) -> None:
        host, port = self._master()
        try:
            socket.create_connection((host, port), timeout=limit).close()
        except OSError as error:
            raise StoreSetupError(
                f"no Mooncake master answers at {self._settings.master_server_address} ({error}). Start one with "
                f"`mooncake_master --rpc_port {port}`, or correct master_server_address or MOONCAKE_MASTER"
            ) from error

    def register(self, address: int, num_bytes: int) -> Status:
        """See `kvpool_connector.contract.store.Store`. Fabric memory needs no registration."""
        client = self._open()
        return Status.OK if self._settings.fabric_memory else _status(client.register_buffer(address, num_bytes))

    def unregister(self, address: int) -> Status:
        """See `kvpool_connector.contract.store.Store`."""
        client = self._open()
        return Status.OK if self._settings.fabric_memory else _status(client.unregister_buffer(address))

    def register_shared(self, regions: Sequence[Region]) -> bool:
        """See `kvpool_connector.contract.store.CacheStore`."""
        self._open()
        if self._settings.protocol == "ascend" and not self._settings.fabric_memory:
            _check_regions(regions)
        if self._engine is None:
            return False
        try:
            # Whoever comes first registers the cache for all connectors; a second time would fail.
            self._engine.register_buffer([r.address for r in regions], [r.num_bytes for r in regions])
        except RuntimeError as error:
            raise StoreSetupError(f"the shared transfer engine did not register the KV cache: {error}") from error
        return True

    def exist(self, keys: Sequence[str]) -> list[Status]:
        """See `kvpool_connector.contract.store.Store`."""
        answers = self._open().batch_is_exist(list(keys))
        if not _one_each(answers, keys):
            return [Status.UNAVAILABLE] * len(keys)
        # Of thousands of keys, so nothing is called for each that is not written in C.
        return list(map(STATUS_OF_EXIST.get, answers, repeat(Status.UNAVAILABLE)))

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        """See `kvpool_connector.contract.store.Store`. Mooncake answers 0 for a key that exists: `OK` covers both."""
        client, keys = self._open(), list(keys)
        statuses: list[Status] = []
        for part in self._batches(keys, sizes, _totals(sizes)):
            answers = client.batch_put_from_multi_buffers(keys[part], addresses[part], sizes[part], self._placement)
            statuses += _per_key(answers, keys[part], lambda answer, _: _status(answer))
        return statuses

    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        """See `kvpool_connector.contract.store.Store`. The size that Mooncake returns is believed, not the sign."""
        client, keys = self._open(), list(keys)
        statuses: list[Status] = []
        totals = _totals(sizes)
        for part in self._batches(keys, sizes, totals):
            answers = client.batch_get_into_multi_buffers(keys[part], addresses[part], sizes[part])
            statuses += _per_key(answers, keys[part], partial(_read_at, totals[part]))
        return statuses

    def begin_put(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Status]:
        """See `kvpool_connector.contract.store.SessionStore`."""
        answers = self._open().batch_put_session_start(list(keys), list(sizes), self._placement)
        return _per_key(answers, keys, lambda answer, _: _status(answer))

    def put_ranges(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, offsets: Pieces) -> list[Status]:
        """See `kvpool_connector.contract.store.SessionStore`."""
        return self._ranges(self._open().batch_put_from_multi_buffer_ranges, keys, addresses, sizes, offsets)

    def end_put(self, keys: Sequence[str]) -> list[Status]:
        """See `kvpool_connector.contract.store.SessionStore`."""
        return _per_key(self._open().batch_put_session_end(list(keys)), keys, lambda answer, _: _status(answer))

    def revoke_put(self, keys: Sequence[str]) -> list[Status]:
        """See `kvpool_connector.contract.store.SessionStore`."""
        return _per_key(self._open().batch_put_session_revoke(list(keys)), keys, lambda answer, _: _status(answer))

    def begin_get(self, keys: Sequence[str]) -> list[Status]:
        """See `kvpool_connector.contract.store.SessionStore`."""
        return _per_key(self._open().batch_get_session_start(list(keys)), keys, lambda answer, _: _status(answer))

    def get_ranges(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, offsets: Pieces) -> list[Status]:
        """See `kvpool_connector.contract.store.SessionStore`."""
        return self._ranges(self._open().batch_get_into_multi_buffer_ranges, keys, addresses, sizes, offsets)

    def end_get(self, keys: Sequence[str]) -> None:
        """See `kvpool_connector.contract.store.SessionStore`."""
        self._open().batch_get_session_end(list(keys))

    def _ranges(
        self,
        call: Callable[[list[str], Pieces, Pieces, Pieces], object],
        keys: Sequence[str],
        addresses: Pieces,
        sizes: Pieces,
        offsets: Pieces,
    ) -> list[Status]:
        """Move parts of objects; the number of bytes that Mooncake returns is believed."""
        keys = list(keys)
        statuses: list[Status] = []
        totals = _totals(sizes)
        for part in self._batches(keys, sizes, totals):
            answers = call(keys[part], addresses[part], sizes[part], offsets[part])
            statuses += _per_key(answers, keys[part], partial(_moved, totals[part]))
        return statuses

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        """See `kvpool_connector.contract.store.Store`."""
        return _per_key(self._open().batch_remove(list(keys), force), keys, lambda answer, _: _status(answer))

    def write(self, key: str, value: bytes, *, pinned: bool = False) -> Status:
        """See `kvpool_connector.contract.store.Store`."""
        source = ctypes.create_string_buffer(value, len(value))
        client, placement = self._open(), self._pinned if pinned else self._placement

        def put(address: int) -> Status:
            answers = client.batch_put_from_multi_buffers([key], [[address]], [[len(value)]], placement)
            return _per_key(answers, [key], lambda answer, _: _status(answer))[0]

        return self._with_registered(source, put)

    def read(self, key: str) -> tuple[Status, bytes]:
        """See `kvpool_connector.contract.store.Store`."""
        size = self._open().get_size(key)
        if not isinstance(size, int) or size <= 0:
            return _status(size) if size != 0 else Status.CORRUPT, b""
        target = ctypes.create_string_buffer(size)
        status = self._with_registered(target, lambda address: self.get([key], [[address]], [[size]])[0])
        return status, target.raw if status.ok else b""

    def close(self) -> None:
        """See `kvpool_connector.contract.store.Store`. No other call may be under way: Mooncake would crash."""
        client, self._client = self._client, None
        if client is not None:
            self._bind_thread()
            client.close()

    def _open(self) -> Any:
        self._bind_thread()
        if self._client is None:
            raise StoreClosedError(
                "the Mooncake client is not connected; call connect() first, and nothing after close()"
            )
        return self._client

    def _with_registered(self, buffer: ctypes.Array[ctypes.c_char], call: Callable[[int], Status]) -> Status:
        address = ctypes.addressof(buffer)
        registered = self.register(address, len(buffer))
        if not registered.ok:
            return registered
        try:
            return call(address)
        finally:
            self.unregister(address)

    def _batches(self, keys: Sequence[str], sizes: Pieces, totals: Sequence[int]) -> Iterator[slice]:
        """Cut a call so that each part stays below the transport's limits and names no key twice.

        Mooncake reports success for every occurrence of a key in one read but fills only the last.
        """
        start = buffers = num_bytes = 0
        seen: set[str] = set()
        for i, (key, pieces, total) in enumerate(zip(keys, sizes, totals, strict=True)):
            full = (
                buffers + len(pieces) > self._pool.max_buffers_per_call
                or num_bytes + total > self._pool.max_bytes_per_call
            )
            if i > start and (full or key in seen):
                yield slice(start, i)
                start, buffers, num_bytes = i, 0, 0
                seen.clear()
            buffers += len(pieces)
            num_bytes += total
            seen.add(key)
        if len(keys) > start:
            yield slice(start, len(keys))


def _check_regions(regions: Sequence[Region]) -> None:
    """Raises `StoreSetupError` for regions that the protocol `ascend` would not take."""
    if len(regions) > MAX_CACHE_REGIONS:
        raise StoreSetupError(
            f"the KV cache lies in {len(regions)} regions of memory; protocol 'ascend' takes at most "
            f'{MAX_CACHE_REGIONS}. Set transfer to "packed", which registers the staging area alone'
        )
    for region in regions:
        if region.address % REGION_ALIGNMENT:
            raise StoreSetupError(
                f"a region of the KV cache starts at {region.address:#x}; with protocol 'ascend' it has to start on a "
                'multiple of 2 MiB. Set transfer to "packed"; staging memory is aligned'
            )


def _totals(sizes: Pieces) -> list[int]:
    """Bytes of each object. Blocks of one layout share one list of sizes, which is added up once."""
    totals: list[int] = []
    last: Sequence[int] | None = None
    total = 0
    for pieces in sizes:
        if pieces is not last:
            last, total = pieces, sum(pieces)
        totals.append(total)
    return totals


def _status(code: object) -> Status:
    return STATUS_OF_CODE.get(code, Status.UNAVAILABLE) if isinstance(code, int) else Status.UNAVAILABLE


def _read_at(expected: Sequence[int], answer: object, i: int) -> Status:
    """A read's answer is the object's size, or a code. Any other size means other bytes than asked for."""
    if isinstance(answer, int) and answer >= 0:
        return Status.OK if answer == expected[i] else Status.CORRUPT
    return Status.CORRUPT if answer == -600 else _status(answer)


def _moved(expected: Sequence[int], answer: object, i: int) -> Status:
    """A range's answer is the bytes moved, or a code. Fewer bytes than asked for are no range."""
    if isinstance(answer, int) and answer >= 0:
        return Status.OK if answer == expected[i] else Status.CORRUPT
    return _status(answer)


def _one_each(answers: object, keys: Sequence[str]) -> TypeGuard[Sequence[Any]]:
    """Whether there is one answer a key. Answers of another number say nothing about any key."""
    return isinstance(answers, list | tuple) and len(answers) == len(keys)


def _per_key(answers: object, keys: Sequence[str], status_of: Callable[[Any, int], Status]) -> list[Status]:
    """One status a key."""
    if not _one_each(answers, keys):
        return [Status.UNAVAILABLE] * len(keys)
    return [status_of(answer, i) for i, answer in enumerate(answers)]
