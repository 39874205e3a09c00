"""Protocol `ascend` on the strict stand-in: threads, registration, fabric memory, a shared engine, limits."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvpool_connector.cli.session import device_binder
from kvpool_connector.config import GIB, StoreSettings
from kvpool_connector.contract.errors import ConfigError, StoreSetupError
from kvpool_connector.contract.layout import Region
from kvpool_connector.contract.status import Status
from kvpool_connector.mooncake import MooncakeStore
from kvpool_simulator.npu import BrokenRuleError, Machine, NpuTensor, Transport
from kvpool_simulator.npu.transport import Engine
from kvpool_simulator.store import SimulatedMaster

MIB = 1 << 20
ALIGNMENT = 2 * MIB


class GlobalEngine:
    """What vLLM-Ascend's `global_te` does: the first caller makes the engine, the first registers the cache."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._engine: Engine | None = None
        self.registered: list[int] = []

    def get_transfer_engine(self, hostname: str, device_name: str | None) -> Engine:
        if self._engine is None:
            self._engine = Engine(self._transport)
            self._engine.initialize(hostname, "P2PHANDSHAKE", "ascend", device_name or "")
        return self._engine

    def register_buffer(self, ptrs: list[int], sizes: list[int]) -> None:
        if self.registered:
            return
        assert self._engine is not None, "Transfer engine must be initialized"
        for address, num_bytes in zip(ptrs, sizes, strict=True):
            if self._engine.register_memory(address, num_bytes):
                raise RuntimeError("Mooncake memory registration failed.")
            self.registered.append(address)


@dataclass
class World:
    """A process on device 1 of a machine, and a master."""

    address: str
    transport: Transport
    machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        self.machine = self.transport.machine
        self.machine.set_device(1)

    def bind(self) -> None:
        self.machine.set_device(1)

    def store(self, bind: bool = True, engine: Any = None, **changed: Any) -> MooncakeStore:
        values = {
            "master_server_address": self.address,
            "protocol": "ascend",
            "global_segment_size": 64 * MIB,
            "local_buffer_size": 16 * MIB,
        }
        settings = StoreSettings.model_validate(values | changed)
        more: dict[str, Any] = {"bind_thread": self.bind} if bind else {}
        return MooncakeStore(settings, module=self.transport, engine=engine, **more)

    def memory(self, num_bytes: int = 4 * MIB) -> NpuTensor:
        """Device memory whose start is aligned."""
        root = self.machine.place(torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8), 1)
        start = -root.data_ptr() % ALIGNMENT
        return root[start : start + num_bytes]  # type: ignore[return-value]

    def regions(self, num: int) -> list[Region]:
        memory = self.memory(num * ALIGNMENT)
        self.kept = memory
        return [Region(memory.data_ptr() + i * ALIGNMENT, MIB) for i in range(num)]


@pytest.fixture
def world() -> Iterator[World]:
    with SimulatedMaster() as master:
        yield World(master.address, Transport(Machine()))


@pytest.fixture
def fabric() -> Iterator[World]:
    with SimulatedMaster() as master:
        yield World(master.address, Transport(Machine(), fabric_memory=True))


def round_trip(world: World, store: MooncakeStore) -> None:
    """From device memory to the store and back, each in a thread that has set no device."""
    memory = world.memory()
    memory.memory[:MIB] = torch.randint(0, 256, (MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    at = memory.data_ptr()
    assert store.register(at, 4 * MIB) is Status.OK
    put: list[Status] = elsewhere(lambda: store.put(["a"], [[at, at + 1000]], [[1000, MIB - 1000]]))
    assert put == [Status.OK]
    assert elsewhere(lambda: store.get(["a"], [[at + 2 * MIB]], [[MIB]])) == [Status.OK]
    assert torch.equal(memory.memory[:MIB], memory.memory[2 * MIB : 3 * MIB])
    assert elsewhere(lambda: store.write("small", b"on the host")) is Status.OK
    assert elsewhere(lambda: store.read("small")) == (Status.OK, b"on the host")


def elsewhere(call: Callable[[], Any]) -> Any:
    """What a call gives in another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


def test_any_thread_may_call(world: World) -> None:
    store = world.store()
    store.connect()
    round_trip(world, store)
    elsewhere(store.close)


def test_threads_that_select_no_device_are_found(world: World) -> None:
    """The planted mistake: setting up takes a thread of its own."""
    with pytest.raises(StoreSetupError, match=r"has set no device; call torch\.npu\.set_device first"):
        world.store(bind=False).connect()


@pytest.mark.parametrize("wrong", ["unaligned", "another device", "outside", "unregistered"])
def test_the_stand_in_finds_memory_that_the_transport_cannot_reach(world: World, wrong: str) -> None:
    store, memory = world.store(), world.memory()
    store.connect()
    at = memory.data_ptr()
    other = world.machine.place(torch.zeros(2 * ALIGNMENT, dtype=torch.uint8), 0)
    calls: dict[str, Callable[[], object]] = {
        "unaligned": lambda: store.register(at + 4096, MIB),
        "another device": lambda: store.register(-(-other.data_ptr() // ALIGNMENT) * ALIGNMENT, MIB),
        "outside": lambda: store.register(at, 64 * MIB),
        "unregistered": lambda: store.put(["a"], [[at]], [[MIB]]),
    }
    with pytest.raises(BrokenRuleError):
        calls[wrong]()
    store.close()


def test_fabric_memory_registers_nothing_and_has_no_buffer(fabric: World) -> None:
    store = fabric.store(fabric_memory=True, global_segment_size=GIB, engine=GlobalEngine(fabric.transport))
    store.connect()
    assert fabric.transport.engine is None
    round_trip(fabric, store)
    assert not store.register_shared([Region(1, 2)] * 1000)
    assert not fabric.transport.regions
    store.close()


def test_without_the_setting_fabric_memory_is_not_used_as_such(fabric: World) -> None:
    with pytest.raises(StoreSetupError, match="expected a multiple of 1 GiB, no buffer, no engine"):
        fabric.store().connect()


def test_fabric_memory_is_told_by_the_environment() -> None:
    environ = {"MOONCAKE_MASTER": "127.0.0.1:1", "ASCEND_ENABLE_USE_FABRIC_MEM": "1"}
    assert StoreSettings.from_environment(environ).fabric_memory
    assert not StoreSettings.from_environment({**environ, "ASCEND_ENABLE_USE_FABRIC_MEM": "0"}).fabric_memory
    with pytest.raises(ConfigError, match=r"whole GiB; set global_segment_size to 2GB"):
        StoreSettings.from_environment({**environ, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "1200MB"})


def test_fabric_memory_is_no_key_of_the_file(tmp_path: Any) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "127.0.0.1:1", "protocol": "tcp", "fabric_memory": true}')
    with pytest.raises(ConfigError, match="set ASCEND_ENABLE_USE_FABRIC_MEM=1"):
        StoreSettings.from_environment({"MOONCAKE_CONFIG_PATH": str(path)})
    path.write_text('{"master_server_address": "127.0.0.1:1", "protocol": "tcp"}')
    environ = {"MOONCAKE_CONFIG_PATH": str(path), "ASCEND_ENABLE_USE_FABRIC_MEM": "1"}
    assert not StoreSettings.from_environment(environ).fabric_memory


@pytest.mark.parametrize("other_connector", ["first", "second", "absent"])
def test_the_engine_is_shared_with_another_connector(world: World, other_connector: str) -> None:
    shared, regions = GlobalEngine(world.transport), world.regions(3)

    def other() -> None:
        shared.get_transfer_engine("127.0.0.1", None)
        shared.register_buffer([r.address for r in regions], [r.num_bytes for r in regions])

    if other_connector == "first":
        other()
    store = world.store(engine=shared, local_hostname="127.0.0.1")
    store.connect()
    assert store.register_shared(regions)
    if other_connector == "second":
        other()
    assert shared.registered == [region.address for region in regions]
    assert elsewhere(lambda: store.put(["b"], [[regions[2].address]], [[MIB]])) == [Status.OK]
    round_trip(world, store)
    store.close()


def test_an_engine_that_is_not_shared_is_found(world: World) -> None:
    """The planted mistake: a second engine beside the other connector's."""
    GlobalEngine(world.transport).get_transfer_engine("127.0.0.1", None)
    with pytest.raises(StoreSetupError, match="has a transfer engine already"):
        world.store().connect()


def test_a_refused_registration_is_told_in_words(world: World) -> None:
    shared, regions = GlobalEngine(world.transport), world.regions(2)
    store = world.store(engine=shared, local_hostname="127.0.0.1")
    store.connect()
    with pytest.raises(StoreSetupError, match=r"did not register the KV cache: Mooncake memory registration failed\."):
        store.register_shared([regions[0], regions[0]])
    store.close()


def test_too_many_regions_are_refused_before_any_is_registered(world: World) -> None:
    store, regions = world.store(), world.regions(1)
    store.connect()
    many = [Region(regions[0].address + i * ALIGNMENT, 1) for i in range(249)]
    assert not store.register_shared(many[:248])
    with pytest.raises(StoreSetupError, match=r"249 regions of memory; protocol 'ascend' takes at most 248\. Set"):
        store.register_shared(many)
    with pytest.raises(StoreSetupError, match=r"starts at 0x1000; .*multiple of 2 MiB\. Set transfer to \"packed\""):
        store.register_shared([Region(4096, 1)])
    assert not world.transport.regions
    store.close()


def test_a_command_uses_the_first_npu_or_says_that_there_is_none(world: World) -> None:
    settings = StoreSettings(master_server_address="127.0.0.1:1", protocol="ascend")
    device_binder(settings.model_copy(update={"protocol": "tcp"}))()
    if importlib.util.find_spec("torch_npu") is None:
        with pytest.raises(StoreSetupError, match=r"needs an NPU.*No module named 'torch_npu'.*run the command"):
            device_binder(settings)
    with world.machine.host():
        try:
            device_binder(settings)()
        finally:
            sys.modules.pop("kvpool_connector.ascend", None)
    assert world.machine.clock.device == 0
