"""A running simulated master, that tests start, look into and break."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.managers import BaseManager
from types import TracebackType
from typing import Any

from kvpool_connector.contract.clock import Clock
from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.store import codes
from kvpool_simulator.store.fault import Faults
from kvpool_simulator.store.master import Master
from kvpool_simulator.store.options import MasterOptions
from kvpool_simulator.store.segment import Owner, SegmentMemory
from kvpool_simulator.store.service import AUTHKEY, EXPOSED, SERVICES, Service


class SimulatedMaster:
    """A simulated `mooncake_master`; a context manager that answers at `address` while it is open.

    With `serve` it answers other processes too, on a loopback port that `address` then names. Profiles: `strict`, for
    what runs on an NPU (memory that is not registered fails: -800), and `tcp` (registration is not enforced, as
    measured; more than 2,048 buffers in one call to another client's memory fail).
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
        if self.address in SERVICES:
            raise ValueError(f"a simulated master already answers at {self.address}; close it, or take another address")
        SERVICES[self.address] = self.service
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del SERVICES[self.address]
        if self._server is not None:
            self._server.listener.close()
            self._server.stop_event.set()

    # Misfortunes

    @property
    def faults(self) -> Faults | None:
        """What befalls clients' calls: asked at each one; None for nothing."""
        return self.service.faults

    @faults.setter
    def faults(self, faults: Faults | None) -> None:
        self.service.faults = faults

    def kill(self) -> None:
        """Every call fails at once from now on: -900."""
        self.service.failure = codes.RPC_FAIL

    def hang(self) -> None:
        """Every call takes 30 s of virtual time from now on and fails: -901."""
        self.service.failure = codes.RPC_TIMEOUT

    def resume(self) -> None:
        """A hung master goes on; nothing is lost."""
        self.service.failure = codes.OK

    def restart(self) -> None:
        """A killed master comes back, empty; clients mount their segments again 0.9 s later."""
        self.service.master.lose_all()
        self.service.failure = codes.OK

    def kill_client(self, name: str) -> None:
        """The process of the client with this `get_hostname()` dies: transfers with its memory fail at once (-800).

        The master lists its objects until `client_ttl_sec` has passed. Raises `KeyError` for an unknown name.
        """
        self.service.killed.add(self.service.clients[name])
        self._set_owner(name, Owner.DEAD)

    def hang_client(self, name: str) -> None:
        """The process stops: transfers with its memory take 30 s and fail (-800), and the master drops it in time."""
        self._set_owner(name, Owner.HUNG)

    def resume_client(self, name: str) -> None:
        """A hung client goes on. Its objects are still there unless the master has dropped it; then it mounts anew."""
        self._set_owner(name, Owner.ALIVE)

    def _set_owner(self, name: str, state: Owner) -> None:
        self.service.master.set_owner(self.service.clients[name], state)

    # Round the store

    def peek(self, key: str) -> bytes | None:
        """An object's bytes, round the store's interface; None when it cannot be read."""
        found = self.service.master.peek(key)
        if found.code != codes.OK:
            return None
        replica = found.replicas[0]
        memory = SegmentMemory(replica.capacity, replica.path)
        try:
            return bytes(memory.view[replica.offset : replica.offset + replica.num_bytes])
        finally:
            memory.close()

    def poke(self, key: str, offset: int, value: bytes) -> None:
        """Change bytes of every replica of an object, round the store's interface.

        Raises `KeyError` without the object, and `ValueError` for bytes beyond its end.
        """
        found = self.service.master.peek(key)
        if found.code != codes.OK:
            raise KeyError(f"{key!r} is not a readable object")
        if not 0 <= offset <= found.num_bytes - len(value):
            raise ValueError(
                f"bytes {offset} to {offset + len(value)} are not inside {key!r} of {found.num_bytes} bytes"
            )
        for replica in found.replicas:
            memory = SegmentMemory(replica.capacity, replica.path)
            start = replica.offset + offset
            memory.view[start : start + len(value)] = value
            memory.close()
