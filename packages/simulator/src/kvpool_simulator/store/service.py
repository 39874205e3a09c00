"""A running simulated master: found by its address, also from other processes, and broken at will."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from multiprocessing.managers import BaseManager
from types import TracebackType
from typing import Any

from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.store import codes
from kvpool_simulator.store.master import Clock, Master
from kvpool_simulator.store.options import MasterOptions
from kvpool_simulator.store.space import SegmentMemory

AUTHKEY = b"kvpool-simulator"
PROFILES = ("strict", "tcp")

Fault = Callable[[str, Sequence[str]], object]
"""Called with a call's name and its keys; what it returns, other than None, is returned instead of the call's result.
It may raise, or wait."""

_SERVICES: dict[str, Service] = {}


class ServiceError(Exception):
    """The master did not answer; `code` is what a client returns then."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Service:
    """What clients reach at an address."""

    def __init__(self, master: Master, profile: str) -> None:
        if profile not in PROFILES:
            raise ValueError(f"profile {profile!r} is unknown; expected one of {PROFILES}")
        self.master = master
        self.profile = profile
        self.failure = codes.OK
        """`OK` while the master answers, else the code that every call gets."""
        self.fault: Fault | None = None
        self._clients = 0
        self._lock = threading.Lock()

    def new_client(self) -> int:
        """A number for a new client."""
        with self._lock:
            self._clients += 1
            return self._clients

    def get_profile(self) -> str:
        """How strict clients are about memory."""
        return self.profile

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the master. Raises `ServiceError` while it is down or hung."""
        if self.failure != codes.OK:
            raise ServiceError(self.failure)
        return getattr(self.master, name)(*arguments)

    def inject(self, call: str, keys: Sequence[str]) -> object:
        """The fault for a client's call, or None."""
        return self.fault(call, keys) if self.fault else None


class SimulatedMaster:
    """A simulated `mooncake_master`; a context manager that answers at `address` while it is open.

    With `serve` it answers other processes too, on a loopback port that `address` then names.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        clock: Clock | None = None,
        options: MasterOptions | None = None,
        profile: str = "strict",
        seed: int = 0,
        serve: bool = False,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.service = Service(Master(self.clock, options or MasterOptions(), seed), profile)
        self.address = address
        self._server: Any = None
        if serve:

            class Manager(BaseManager):
                """A class of its own: what is registered belongs to the class."""

            Manager.register("service", callable=lambda: self.service, exposed=EXPOSED)
            self._server = Manager(("127.0.0.1", 0), AUTHKEY).get_server()
            self.address = f"127.0.0.1:{self._server.address[1]}"
            threading.Thread(target=self._serve, name="kvpool-simulated-master", daemon=True).start()

    def _serve(self) -> None:
        # The standard library's server ends its thread by ending the interpreter.
        with contextlib.suppress(SystemExit):
            self._server.serve_forever()

    def __enter__(self) -> SimulatedMaster:
        if self.address in _SERVICES:
            raise ValueError(f"a simulated master already answers at {self.address}")
        _SERVICES[self.address] = self.service
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del _SERVICES[self.address]
        if self._server is not None:
            self._server.listener.close()
            self._server.stop_event.set()

    def kill(self) -> None:
        """Every call fails at once from now on."""
        self.service.failure = codes.RPC_FAIL

    def hang(self) -> None:
        """Every call times out from now on (without the wait)."""
        self.service.failure = codes.RPC_TIMEOUT

    def resume(self) -> None:
        """A hung master goes on; nothing is lost."""
        self.service.failure = codes.OK

    def restart(self) -> None:
        """A killed master comes back, empty; clients' segments are mounted again."""
        self.service.master.lose_all()
        self.service.failure = codes.OK

    def inject(self, fault: Fault | None) -> None:
        """Set what happens to clients' calls; None for nothing."""
        self.service.fault = fault

    def peek(self, key: str) -> bytes | None:
        """An object's bytes, round the store's interface; None when it cannot be read."""
        found = self.service.master.peek(key)
        if found.code != codes.OK:
            return None
        replica = found.replicas[0]
        memory = SegmentMemory(replica.capacity, replica.path)
        try:
            return memory.read(replica.offset, replica.num_bytes)
        finally:
            memory.close()

    def poke(self, key: str, offset: int, value: bytes) -> None:
        """Change bytes of every replica of an object, round the store's interface. Raises `KeyError` without it."""
        found = self.service.master.peek(key)
        if found.code != codes.OK:
            raise KeyError(f"{key!r} is not a readable object")
        for replica in found.replicas:
            memory = SegmentMemory(replica.capacity, replica.path)
            memory.write(replica.offset + offset, value)
            memory.close()


EXPOSED = ("new_client", "get_profile", "call", "inject")


class _Remote(BaseManager):
    """The way to a service of another process."""


_Remote.register("service", exposed=EXPOSED)


def find_service(address: str) -> Any:
    """The service at an address: of this process, or of another that serves it. Raises `ConnectionError` for none."""
    if address in _SERVICES:
        return _SERVICES[address]
    host, _, port = address.rpartition(":")
    client = _Remote((host, int(port)), AUTHKEY)
    client.connect()
    return client.service()  # type: ignore[attr-defined]
