"""What clients reach at a master's address, from the same process or from another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.managers import BaseManager
from typing import Any

from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.store import codes
from kvpool_simulator.store.fault import Fault, Faults
from kvpool_simulator.store.master import Master

AUTHKEY = b"kvpool-simulator"
PROFILES = ("strict", "tcp")
RPC_TIMEOUT_S = 30.0
"""How long a client waits for a master that hangs, and for the owner of bytes that does."""
EXPOSED = ("join", "call", "fault_for", "pass_time")
NO_ANSWER = (OSError, EOFError, AuthenticationError)
"""What a call raises whose master is in a process that is gone."""


class ServiceError(Exception):
    """The master did not answer; `code` is what a client returns then."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Service:
    """A master as its clients see it: it answers, is down, or hangs."""

    def __init__(self, master: Master, profile: str) -> None:
        if profile not in PROFILES:
            raise ValueError(f"profile {profile!r} is unknown; expected one of {PROFILES}")
        self.master = master
        self.profile = profile
        self.failure = codes.OK
        """`OK` while the master answers, else the code that every call gets."""
        self.faults: Faults | None = None
        self.clients: dict[str, int] = {}
        """By name: the number of each client that ever joined."""
        self.killed: set[int] = set()
        self._ports = itertools.count(12_001)
        self._lock = threading.Lock()

    def join(self, host: str) -> tuple[int, str, str, str]:
        """A new client: its number, its name (that of its segment too), its endpoint, and the memory profile."""
        self._answer(0)
        with self._lock:
            name = host if ":" in host else f"{host}:{next(self._ports)}"
            number = self.clients[name] = len(self.clients) + 1
            return number, name, f"{host.partition(':')[0]}:{next(self._ports)}", self.profile

    def call(self, client: int, name: str, *arguments: Any) -> Any:
        """Call the master. Raises `ServiceError` while it is down or hangs."""
        self._answer(client)
        return getattr(self.master, name)(*arguments)

    def fault_for(self, call: str, keys: Sequence[str]) -> Fault | None:
        """What befalls a client's call."""
        return self.faults(call, keys) if self.faults is not None else None

    def pass_time(self, seconds: float) -> None:
        """A call takes this long. Real clocks are left alone: nothing ever sleeps."""
        if isinstance(self.master.clock, VirtualClock):
            self.master.clock.advance(seconds)

    def _answer(self, client: int) -> None:
        if client in self.killed:
            raise RuntimeError(f"client {client} was killed: its process makes no calls any more")
        if self.failure == codes.RPC_TIMEOUT:
            self.pass_time(RPC_TIMEOUT_S)
        if self.failure != codes.OK:
            raise ServiceError(self.failure)


SERVICES: dict[str, Service] = {}
"""By address: the services of this process."""


class _Remote(BaseManager):
    """The way to a service of another process."""


_Remote.register("service", exposed=EXPOSED)


def find_service(address: str) -> Any:
    """The service at an address: of this process, or of another that serves it.

    Raises one of `NO_ANSWER`, or `ValueError` for what is no address, where there is none.
    """
    if address in SERVICES:
        return SERVICES[address]
    host, _, port = address.rpartition(":")
    remote = _Remote((host, int(port)), AUTHKEY)
    remote.connect()
    return remote.service()  # type: ignore[attr-defined]
