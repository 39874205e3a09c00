"""Two worlds in which the same claims are tested: the simulated store and real Mooncake."""

from __future__ import annotations

import ctypes
import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kvpool_simulator import store as simulated
from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.store import MasterOptions, SimulatedMaster
from tests.targets.real_mooncake import RealMaster

LEASE_S = 1.0
DISCARD_S = 3.0
RELEASE_S = 8.0
SEGMENT_BYTES = 64 << 20


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


class World:
    """A master with clients, and a way to let time pass."""

    name = ""

    def __init__(self, module: Any, address: str) -> None:
        self.module = module
        self.address = address
        self._clients: list[Any] = []
        self._names = itertools.count()

    def client(self, segment_bytes: int = 0) -> Any:
        """A client of its own."""
        client = self.module.MooncakeDistributedStore()
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", self.address)
        assert code == 0, f"setup returned {code}"
        self._clients.append(client)
        return client

    def key(self) -> str:
        """A key that nobody has used."""
        return f"{uuid.uuid4().hex}-{next(self._names)}"

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()
        self._clients.clear()


class SimulatedWorld(World):
    """Time is virtual."""

    name = "simulator"

    def __init__(self, master: SimulatedMaster, clock: VirtualClock) -> None:
        super().__init__(simulated, master.address)
        self.master = master
        self._clock = clock

    def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)


class RealWorld(World):
    """Time passes by itself."""

    name = "mooncake"

    def __init__(self, address: str) -> None:
        import mooncake.store

        super().__init__(mooncake.store, address)

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


@contextmanager
def simulated_world() -> Iterator[World]:
    """A simulated master over TCP's rules."""
    clock = VirtualClock(start=1000.0)
    options = MasterOptions(
        default_kv_lease_ttl_ms=int(LEASE_S * 1000),
        put_start_discard_timeout_sec=DISCARD_S,
        put_start_release_timeout_sec=RELEASE_S,
    )
    address = f"127.0.0.1:{uuid.uuid4().int % 10**9}"
    with SimulatedMaster(address, clock=clock, options=options, profile="tcp") as master:
        world = SimulatedWorld(master, clock)
        try:
            yield world
        finally:
            world.close()


@contextmanager
def real_world() -> Iterator[World]:
    """A real master."""
    flags = {"put_start_discard_timeout_sec": int(DISCARD_S), "put_start_release_timeout_sec": int(RELEASE_S)}
    with ExitStack() as stack:
        master = RealMaster(0, LEASE_S, flags=flags)
        stack.callback(master.close)
        master.start()
        world = RealWorld(master.address)
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
