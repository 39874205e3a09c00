"""Mooncake's protocol `ascend` on a simulated machine: the simulated store, strict about what the transport wants.

The rules are those that vLLM-Ascend's code keeps (`distributed/kv_transfer/utils`) and that the messages inside
`mooncake-transfer-engine-npu` 0.3.13.post1 tell; no transport has been asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import kvpool_simulator.store as simulated
from kvpool_simulator.npu.machine import Machine
from kvpool_simulator.npu.streams import BrokenRuleError
from kvpool_simulator.store.memory import LocalMemory

START_ALIGNMENT = 2 << 20
MAX_REGIONS = 256
GIB = 1 << 30
ALREADY_REGISTERED = -600


class Transport:
    """Stands for the module `mooncake.store` of one process: its memory, its engine, its clients."""

    ReplicateConfig = simulated.ReplicateConfig

    def __init__(self, machine: Machine, *, fabric_memory: bool = False) -> None:
        """`fabric_memory`: as with `ASCEND_ENABLE_USE_FABRIC_MEM=1` on an A3."""
        self.machine = machine
        self.fabric_memory = fabric_memory
        self.engine: Engine | None = None
        self.regions: dict[int, int] = {}
        """Bytes by address, of all that this process has registered."""

    def MooncakeDistributedStore(self) -> Client:
        """A client, not set up."""
        return Client(self)

    def check_thread(self, call: str) -> int:
        """The calling thread's device. Raises `BrokenRuleError` where it has none: the transport copies with it."""
        try:
            return self.machine.clock.device
        except BrokenRuleError as error:
            raise BrokenRuleError(f"{call}: {error}") from None

    def register(self, address: int, num_bytes: int) -> int:
        """0; a code for a region that overlaps another. Raises `BrokenRuleError` for what breaks the transport."""
        self.check_thread("registering memory")
        if self.fabric_memory:
            raise BrokenRuleError("memory was registered although fabric memory is on; nothing is to be registered")
        index = self.machine.device_of(address, num_bytes)
        if index is not None and address % START_ALIGNMENT:
            raise BrokenRuleError(f"a region on npu:{index} starts at {address:#x}; expected a multiple of 2 MiB")
        if index not in (None, self.machine.clock.device):
            raise BrokenRuleError(f"memory of npu:{index} was registered in a thread of {self.machine.clock.device}")
        if len(self.regions) == MAX_REGIONS:
            raise BrokenRuleError(f"more than {MAX_REGIONS} regions were registered in one process")
        if any(start < address + num_bytes and address < start + size for start, size in self.regions.items()):
            return ALREADY_REGISTERED
        self.regions[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        """0, or a code for anything but the exact start of a region."""
        self.check_thread("unregistering memory")
        return 0 if self.regions.pop(address, None) else ALREADY_REGISTERED

    def check_memory(self, call: str, addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> None:
        """Every piece is memory that the transport can reach, on the thread's device or on the host."""
        index = self.check_thread(call)
        for address, size in zip(_flat(addresses), _flat(sizes), strict=True):
            found = self.machine.device_of(address, size)
            if found not in (None, index):
                raise BrokenRuleError(f"{call}: memory of npu:{found} in a thread of device {index}")
            if self.fabric_memory:
                continue
            if not any(start <= address and address + size <= start + num for start, num in self.regions.items()):
                raise BrokenRuleError(f"{call}: [{address:#x}, {address + size:#x}) is in no registered region")


class Engine:
    """Stands for `mooncake.engine.TransferEngine`: one a process."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """0. Raises `BrokenRuleError` for a second engine in a process."""
        self._transport.check_thread("initialize()")
        if self._transport.engine is not None:
            raise BrokenRuleError("a second transfer engine in one process; share the first")
        if (metadata_server, protocol) != ("P2PHANDSHAKE", "ascend"):
            raise BrokenRuleError(f"an engine for {protocol!r} with {metadata_server!r}")
        self._transport.engine = self
        return 0

    def get_rpc_port(self) -> int:
        """Where other engines reach this one."""
        return 16789

    def get_engine(self) -> object:
        """What `MooncakeDistributedStore.setup` takes."""
        return self

    def register_memory(self, address: int, num_bytes: int) -> int:
        """See `Transport.register`."""
        return self._transport.register(address, num_bytes)


class Client(simulated.MooncakeDistributedStore):
    """A client of a simulated master over the transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._registered: set[int] = set()
        super().__init__()

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """As `MooncakeDistributedStore.setup`, with the transport's rules for each argument."""
        host, _, segment_bytes, buffer_bytes, protocol = args[:5]
        transport, engine = self._transport, kwargs.pop("engine", None)
        transport.check_thread("setup()")
        if protocol != "ascend":
            raise BrokenRuleError(f"protocol {protocol!r} over device memory; expected 'ascend'")
        if transport.fabric_memory and (segment_bytes % GIB or buffer_bytes or engine is not None):
            raise BrokenRuleError(
                f"fabric memory with a segment of {segment_bytes} and a buffer of {buffer_bytes} bytes, engine "
                f"{engine!r}; expected a multiple of 1 GiB, no buffer, no engine"
            )
        if engine is not transport.engine:
            raise BrokenRuleError("this process has a transfer engine already, and setup() was given another or none")
        if engine is not None and host.rpartition(":")[2] != str(engine.get_rpc_port()):
            raise BrokenRuleError(f"local_hostname {host!r} is not where the shared engine answers")
        code = int(super().setup(*args, **kwargs))
        # Which memory may be touched is the transport's to say.
        self._memory = LocalMemory(strict=False)
        return code

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """See `Transport.register`."""
        code = self._transport.register(buffer_ptr, size)
        if code == 0:
            self._registered.add(buffer_ptr)
        return code

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """See `Transport.unregister`."""
        self._registered.discard(buffer_ptr)
        return self._transport.unregister(buffer_ptr)

    def close(self) -> int:
        """Leave; what this client has registered is forgotten."""
        for address in list(self._registered):
            self._transport.regions.pop(address, None)
        self._registered.clear()
        return int(super().close())


def _moving(name: str) -> Callable[..., Any]:
    """A call that touches memory, checked before it is made."""
    inner = getattr(simulated.MooncakeDistributedStore, name)

    def call(self: Client, keys: list[str], addresses: Any, sizes: Any, *more: Any) -> Any:
        self._transport.check_memory(name, addresses, sizes)
        return inner(self, keys, addresses, sizes, *more)

    return call


for _name in (
    "batch_put_from_multi_buffers",
    "batch_get_into_multi_buffers",
    "batch_put_from_multi_buffer_ranges",
    "batch_get_into_multi_buffer_ranges",
):
    setattr(Client, _name, _moving(_name))


def _flat(values: Iterable[Sequence[int]]) -> list[int]:
    return [value for one in values for value in one]
