"""The connector on the simulated store, in its strict profile, with virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import kvpool_simulator.store
from kvpool_connector.config import StoreSettings
from kvpool_connector.mooncake import MooncakeStore
from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.store import SimulatedMaster
from tests.targets.memory import HostMemory, MemoryFactory
from tests.targets.process import StoreFactory
from tests.targets.target import Target

LEASE_S = 10.0


def make_store(address: str, segment_bytes: int) -> MooncakeStore:
    """A connected client of a simulated master, from any process."""
    settings = StoreSettings(
        master_server_address=address, protocol="tcp", global_segment_size=segment_bytes, local_buffer_size=0
    )
    store = MooncakeStore(settings, module=kvpool_simulator.store)
    store.connect()
    return store


class SimulatorTarget(Target):
    """Time moves when told, and objects can be looked at from behind."""

    def __init__(
        self,
        master: SimulatedMaster,
        name: str = "simulator",
        make_store: StoreFactory = make_store,
        make_memory: MemoryFactory = HostMemory,
        num_clients: int = 2,
    ) -> None:
        super().__init__(name, master.address, make_store, LEASE_S, make_memory, num_clients)
        self._master = master

    def peek(self, key: str) -> bytes | None:
        return self._master.peek(key)

    def poke(self, key: str, offset: int, value: bytes) -> None:
        self._master.poke(key, offset, value)

    def advance(self, seconds: float) -> None:
        assert isinstance(self._master.clock, VirtualClock)
        self._master.clock.advance(seconds)


@contextmanager
def simulator(segment_bytes: int = 2 << 30) -> Iterator[SimulatorTarget]:
    """A simulated master with memory, answering other processes too."""
    with SimulatedMaster(serve=True) as master:
        owner = make_store(master.address, segment_bytes)
        target = SimulatorTarget(master)
        try:
            yield target
        finally:
            target.close()
            owner.close()
