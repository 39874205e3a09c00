"""Two worlds in which the same claims are tested: the simulated store and real Mooncake."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kvpool_simulator import store as simulated
from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.store import MasterOptions, SimulatedMaster
from tests.targets.real_mooncake import OWNER, RealMaster, free_port

LEASE_S = 1.0
DISCARD_S = 3.0
RELEASE_S = 8.0
CLIENT_TTL_S = 3.0
SEGMENT_BYTES = 64 << 20
WAITS = {"MC_RPC_TIMEOUT_MS": "2000", "MC_TCP_PROGRESS_TIMEOUT_SEC": "3", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
"""Bounds of real Mooncake's waits, unless set already: by default 30 s each."""


class Memory:
    """Bytes of a test at an address."""

    def __init__(self, num_bytes: int, fill: int = 0xA5) -> None:
        self.buffer = ctypes.create_string_buffer(bytes([fill]) * num_bytes, num_bytes)
        self.address = ctypes.addressof(self.buffer)
        self.num_bytes = num_bytes

    @property
    def value(self) -> bytes:
        """What it holds."""
        return self.buffer.raw


def holding(value: bytes) -> Memory:
    """Memory with these bytes."""
    memory = Memory(len(value))
    ctypes.memmove(memory.address, value, len(value))
    return memory


class Owner:
    """A client that only gives memory, and can be killed or stopped."""

    def kill(self) -> None:
        """End at once, as a crash would."""
        raise NotImplementedError

    def stop(self) -> None:
        """Hang."""
        raise NotImplementedError

    def go_on(self) -> None:
        """Hang no longer."""
        raise NotImplementedError


class World:
    """A master with clients, and a way to let time pass."""

    name = ""

    def __init__(self, module: Any, address: str) -> None:
        self.module = module
        self.address = address
        self._clients: list[Any] = []
        self._names = itertools.count()

    def client(self, segment_bytes: int = 0, buffer_bytes: int = 16 << 20) -> Any:
        """A client of its own."""
        client = self.module.MooncakeDistributedStore()
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", self.address)
        assert code == 0, f"setup returned {code}"
        self._clients.append(client)
        return client

    def config(self, **settings: Any) -> Any:
        """A configuration of puts."""
        config = self.module.ReplicateConfig()
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    def key(self) -> str:
        """A key that nobody has used."""
        return f"{uuid.uuid4().hex}-{next(self._names)}"

    def now(self) -> float:
        """Seconds, as this world counts them."""
        raise NotImplementedError

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        raise NotImplementedError

    def readable_keys(self) -> set[str]:
        """All readable keys; grants no lease."""
        raise NotImplementedError

    def used_bytes(self) -> int:
        """Bytes that objects and unfinished writes asked for."""
        raise NotImplementedError

    def owner(self, segment_bytes: int) -> Owner:
        """A client in a process of its own."""
        raise NotImplementedError

    def kill(self) -> None:
        """The master dies."""
        raise NotImplementedError

    def restart(self) -> None:
        """It comes back."""
        raise NotImplementedError

    def hang(self) -> None:
        """It hangs."""
        raise NotImplementedError

    def resume(self) -> None:
        """It hangs no longer."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()
        self._clients.clear()


class SimulatedOwner(Owner):
    """A client of this process, as far as the master can tell in another."""

    def __init__(self, master: SimulatedMaster, name: str) -> None:
        self._master, self._name = master, name

    def kill(self) -> None:
        self._master.kill_client(self._name)

    def stop(self) -> None:
        self._master.hang_client(self._name)

    def go_on(self) -> None:
        self._master.resume_client(self._name)


class SimulatedWorld(World):
    """Time is virtual."""

    name = "simulator"

    def __init__(self, master: SimulatedMaster, clock: VirtualClock) -> None:
        super().__init__(simulated, master.address)
        self.master = master
        self._clock = clock

    def now(self) -> float:
        return self._clock.now()

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def readable_keys(self) -> set[str]:
        return set(self.master.service.master.keys())

    def used_bytes(self) -> int:
        master = self.master.service.master
        master.keys()
        return master.segments.used_bytes

    def owner(self, segment_bytes: int) -> Owner:
        return SimulatedOwner(self.master, self.client(segment_bytes).get_hostname())

    def kill(self) -> None:
        self.master.kill()

    def restart(self) -> None:
        self.master.restart()

    def hang(self) -> None:
        self.master.hang()

    def resume(self) -> None:
        self.master.resume()


class RealOwner(Owner):
    """A process."""

    def __init__(self, address: str, segment_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, address, str(segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().strip()
        assert answer == "ready", f"the owner of the memory did not start: {answer or 'it ended'}"

    def kill(self) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            if self.process.poll() is None:
                self.process.send_signal(number)
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


class RealWorld(World):
    """Time passes by itself."""

    name = "mooncake"

    def __init__(self, master: RealMaster, metrics_port: int) -> None:
        for name, value in WAITS.items():
            os.environ.setdefault(name, value)
        import mooncake.store

        super().__init__(mooncake.store, master.address)
        self.master = master
        self._metrics = f"http://127.0.0.1:{metrics_port}"
        self._owners: list[RealOwner] = []

    def now(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)

    def _page(self, path: str) -> list[str]:
        with urllib.request.urlopen(f"{self._metrics}/{path}", timeout=10) as page:
            return str(page.read().decode()).splitlines()

    def readable_keys(self) -> set[str]:
        return set(self._page("get_all_keys"))

    def used_bytes(self) -> int:
        (line,) = [line for line in self._page("metrics") if line.startswith("master_allocated_bytes ")]
        return int(float(line.split()[1]))

    def owner(self, segment_bytes: int) -> Owner:
        self._owners.append(RealOwner(self.address, segment_bytes))
        return self._owners[-1]

    def kill(self) -> None:
        self.master.kill()

    def restart(self) -> None:
        self.master.start()

    def hang(self) -> None:
        self.master.stop()

    def resume(self) -> None:
        self.master.go_on()

    def close(self) -> None:
        super().close()
        for owner in self._owners:
            owner.kill()


FLAGS: dict[str, float] = {
    "put_start_discard_timeout_sec": DISCARD_S,
    "put_start_release_timeout_sec": RELEASE_S,
    "client_ttl": CLIENT_TTL_S,
}


@contextmanager
def simulated_world(**flags: float) -> Iterator[World]:
    """A simulated master over TCP's rules. Flags are `mooncake_master`'s."""
    clock = VirtualClock(start=1000.0)
    settings: dict[str, Any] = {**FLAGS, **flags}
    settings["client_ttl_sec"] = settings.pop("client_ttl")
    lease_ms = int(settings.pop("default_kv_lease_ttl", LEASE_S * 1000))
    options = MasterOptions(default_kv_lease_ttl_ms=lease_ms, **settings)
    address = f"127.0.0.1:{uuid.uuid4().int % 10**9}"
    with SimulatedMaster(address, clock=clock, options=options, profile="tcp") as master:
        world = SimulatedWorld(master, clock)
        try:
            yield world
        finally:
            world.close()


@contextmanager
def real_world(**flags: float) -> Iterator[World]:
    """A real master."""
    metrics_port = free_port()
    settings = {name: f"{value:g}" for name, value in {**FLAGS, **flags}.items()}
    with ExitStack() as stack:
        # The last of two equal flags counts.
        master = RealMaster(0, LEASE_S, flags={**settings, "metrics_port": metrics_port})
        stack.callback(master.close)
        master.start()
        world = RealWorld(master, metrics_port)
        stack.callback(world.close)
        yield world


def put(client: Any, key: str, value: bytes, config: Any = None) -> int:
    """Put a value through one buffer; its code."""
    memory = holding(value)
    arguments = ([key], [[memory.address]], [[len(value)]])
    (code,) = client.batch_put_from_multi_buffers(*arguments, *([config] if config else []))
    return int(code)


def get(client: Any, key: str, num_bytes: int) -> tuple[int, bytes]:
    """Get into one buffer; its code and what the buffer holds."""
    memory = Memory(num_bytes)
    (code,) = client.batch_get_into_multi_buffers([key], [[memory.address]], [[num_bytes]])
    return int(code), memory.value


def cut(memory: Memory, *sizes: int) -> tuple[list[int], list[int]]:
    """Addresses and sizes of consecutive pieces."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [memory.address + start for start in starts], list(sizes)


def poison(num_bytes: int) -> bytes:
    """What untouched memory holds."""
    return bytes([0xA5]) * num_bytes


Codes = Sequence[int]
