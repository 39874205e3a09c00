"""A client's life: it joins a master, gives it memory, registers its own, and leaves."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from kvpool_simulator.store import codes
from kvpool_simulator.store.arguments import integer, num_bytes, text
from kvpool_simulator.store.calls import call
from kvpool_simulator.store.codes import WouldCrashError
from kvpool_simulator.store.fault import Fault
from kvpool_simulator.store.memory import LocalMemory
from kvpool_simulator.store.objects import Lookup
from kvpool_simulator.store.segment import Owner, Replica, SegmentMemory
from kvpool_simulator.store.service import NO_ANSWER, RPC_TIMEOUT_S, ServiceError, find_service

MIN_SEGMENT_BYTES = 16 << 20
DEFAULTS: dict[str, str | int] = {
    "global_segment_size": 16 << 20,
    "local_buffer_size": 16 << 20,
    "protocol": "tcp",
    "rdma_devices": "",
    "master_server_addr": "127.0.0.1:50051",
}
"""What `setup(dict)` may leave out."""
PROTOCOLS = {"strict": ("tcp", "rdma", "ascend"), "tcp": ("tcp", "rdma")}
"""What each profile knows. Mooncake's wheel for hosts without devices has no `ascend`."""
REQUIRED: Any = object()


class UnderWay:
    """Counts the calls that have not returned."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self.count -= 1


class Connection:
    """One client of a simulated master, without what it is for."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.under_way = UnderWay()
        self._service: Any = None
        self._client = 0
        self._name = ""
        self._segment: SegmentMemory | None = None
        self._memory = LocalMemory(strict=True)
        self._limited = False
        self._buffer_bytes = 0
        self._mapped: dict[str, SegmentMemory] = {}
        self._thread = threading.local()
        self._open_puts: dict[str, Any] = {}
        self._open_gets: dict[str, Lookup] = {}

    def setup(
        self,
        local_hostname: str | Mapping[str, str | int],
        metadata_server: str = REQUIRED,
        global_segment_size: int = REQUIRED,
        local_buffer_size: int = REQUIRED,
        protocol: str = REQUIRED,
        rdma_devices: str = REQUIRED,
        master_server_addr: str = REQUIRED,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
    ) -> int:
        """Join a master and give it a segment; also as `setup(dict)`, with numbers in words.

        0; -1 when no master answers or the protocol is unknown; -600 for a segment of less than 16 MiB (0 is fine), or
        a dict that lacks an address. A second set-up drops the first.
        """
        if isinstance(local_hostname, Mapping):
            return self._setup_from(local_hostname)
        required = (metadata_server, global_segment_size, local_buffer_size, protocol, rdma_devices, master_server_addr)
        if REQUIRED in required:
            raise TypeError("setup() takes a dict, or seven arguments up to master_server_addr")
        segment_bytes, buffer_bytes = integer(global_segment_size), integer(local_buffer_size)
        for words in (local_hostname, metadata_server, protocol, rdma_devices, master_server_addr):
            text(words)
        return self._join(local_hostname, segment_bytes, buffer_bytes, protocol, master_server_addr)

    def _setup_from(self, config: Mapping[str, str | int]) -> int:
        settings = {**DEFAULTS, **config}
        if not settings.get("local_hostname") or not settings.get("metadata_server"):
            return codes.INVALID_PARAMS
        try:
            segment_bytes = num_bytes(settings["global_segment_size"])
            buffer_bytes = num_bytes(settings["local_buffer_size"])
        except ValueError:
            return codes.INVALID_PARAMS
        words = [str(settings[name]) for name in ("local_hostname", "protocol", "master_server_addr")]
        return self._join(words[0], segment_bytes, buffer_bytes, *words[1:])

    def _join(self, host: str, segment_bytes: int, buffer_bytes: int, protocol: str, address: str) -> int:
        if 0 < segment_bytes < MIN_SEGMENT_BYTES:
            return codes.INVALID_PARAMS
        self.close()
        segment = None
        try:
            service = find_service(address)
            client, self._name, endpoint, profile = service.join(host)
            if protocol not in PROTOCOLS[profile]:
                return codes.SETUP_FAIL
            if segment_bytes:
                segment = SegmentMemory(segment_bytes)
                service.call(client, "mount", self._name, endpoint, client, segment.path, segment_bytes)
        except (ServiceError, ValueError, *NO_ANSWER):
            if segment is not None:
                segment.close()
            return codes.SETUP_FAIL
        self.process = os.getpid()
        self._client, self._segment = client, segment
        self._memory = LocalMemory(strict=profile == "strict")
        self._limited = profile == "tcp"
        self._buffer_bytes = buffer_bytes
        self._service = service
        return codes.OK

    def close(self) -> int:
        """Leave: this client's segment and what lies in it are gone. Idempotent, always 0.

        Raises `WouldCrashError` while another thread is inside a call.
        """
        if self._service is not None and self.under_way.count:
            raise WouldCrashError("close() while another thread is inside a call")
        service, self._service = self._service, None
        if service is not None and self.process == os.getpid():
            # A master that is down forgets the segment anyway, and a killed client tells nobody.
            with contextlib.suppress(ServiceError, RuntimeError, *NO_ANSWER):
                service.call(self._client, "unmount", self._client)
        for memory in (*self._mapped.values(), self._segment):
            if memory is not None:
                memory.close()
        self._mapped.clear()
        self._segment = None
        self._open_puts.clear()
        self._open_gets.clear()
        return codes.OK

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    @call(lambda: 1)
    def health_check(self) -> int:
        """0 well, 1 not set up, 2 no master."""
        return 2 if isinstance(self._ask("now"), int) else 0

    @call()
    def get_hostname(self) -> str:
        """The name of this client and of its segment."""
        return self._name

    @call()
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """0, or -600 for an empty, null or overlapping region."""
        return self._memory.register(integer(buffer_ptr), integer(size))

    @call()
    def unregister_buffer(self, buffer_ptr: int) -> int:
        """0, or -600 for anything but the exact start of a region."""
        return self._memory.unregister(integer(buffer_ptr))

    # For calls

    @property
    def ready(self) -> bool:
        """Set up and not closed."""
        return self._service is not None

    def fault_for(self, name: str, keys: Sequence[str]) -> Fault | None:
        """What befalls a call."""
        try:
            found: Fault | None = self._service.fault_for(name, keys)
        except NO_ANSWER:
            return None
        return found

    def pass_time(self, seconds: float) -> None:
        """A call takes this long."""
        if seconds:
            with contextlib.suppress(*NO_ANSWER):
                self._service.pass_time(seconds)

    def set_transfer_time(self, seconds: float) -> None:
        """How long the next transfer of this thread takes."""
        self._thread.transfer_s = seconds

    def _pass_transfer_time(self) -> None:
        self.pass_time(getattr(self._thread, "transfer_s", 0.0))

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call the master; the code of the failure, an int, when it does not answer."""
        try:
            return self._service.call(self._client, name, *arguments)
        except ServiceError as error:
            return error.code
        except NO_ANSWER:
            return codes.RPC_FAIL

    def _now(self) -> float:
        """The master's time; without an answer nothing has run out."""
        found = self._ask("now")
        return found if isinstance(found, float) else 0.0

    def _query(self, keys: Sequence[str]) -> Sequence[Lookup]:
        found = self._ask("query", keys)
        return [Lookup(found)] * len(keys) if isinstance(found, int) else found

    def _ask_each(self, name: str, keys: Sequence[str], *arguments: Any) -> list[int]:
        """Call the master, that answers with one code a key."""
        found = self._ask(name, keys, *arguments)
        return [found] * len(keys) if isinstance(found, int) else found

    # Memory of segments

    def _is_own(self, replica: Replica) -> bool:
        return replica.segment == self._name

    def _memory_of(self, replica: Replica) -> SegmentMemory | None:
        """The memory that a replica lies in; None when the owner does not answer."""
        if replica.owner is Owner.HUNG:
            self.pass_time(RPC_TIMEOUT_S)
        if replica.owner is not Owner.ALIVE:
            return None
        # By endpoint, which no other segment ever has: a path comes back with the number of a descriptor.
        memory = self._mapped.get(replica.endpoint)
        try:
            if memory is None:
                memory = self._mapped[replica.endpoint] = SegmentMemory(replica.capacity, replica.path)
            elif not replica.path.startswith(f"/proc/{self.process}/"):
                os.stat(replica.path)
        except OSError:
            self._mapped.pop(replica.endpoint, None)
            self._ask("report_gone", replica.segment)
            return None
        return memory
