"""An Ascend NPU with Mooncake's protocol `ascend` (docs/npu.md), and its stand-in, which any machine can run.

The real target has not run yet. What differs between the two is in `npu_*` and `stand_in_*`; all else runs on both.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from kvpool_conformance.cases import Deployment
from kvpool_connector.config import StoreSettings
from kvpool_connector.mooncake import MooncakeStore, import_mooncake
from kvpool_simulator.npu import Machine, Transport
from kvpool_simulator.store import SimulatedMaster
from tests.targets.memory import NpuMemory
from tests.targets.real_mooncake import RealMaster
from tests.targets.simulator import SimulatorTarget
from tests.targets.target import Target

LEASE_S = 5.0
"""Longer than `ASCEND_CONNECT_TIMEOUT` (3 s by default) and short enough to wait for."""
SOURCE = Path(__file__).parents[2] / "packages/connector/src/kvpool_connector/ascend.py"
BUFFER_BYTES = 16 << 20
OWNER = """
import sys
import torch
import torch_npu
from mooncake.store import MooncakeDistributedStore
torch.npu.set_device(0)
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "ascend", "", sys.argv[1])
print("ready" if code == 0 else f"setup returned {code}", flush=True)
sys.stdin.read()
store.close()
"""
"""As in `tests.targets.real_mooncake`, for a transport that needs a device."""


def unreachable() -> str:
    """Why there is no NPU here; empty when there is one."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed (docs/npu.md says what a machine needs)"
    try:
        import torch
        import torch_npu  # noqa: F401
    except Exception as error:
        return f"torch_npu cannot be imported ({error}); source CANN's set_env.sh first"
    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.is_available():
        return "torch_npu sees no NPU; check npu-smi info and ASCEND_RT_VISIBLE_DEVICES"
    try:
        import_mooncake()
    except Exception as error:
        return f"{error} (for an NPU: pip install mooncake-transfer-engine-npu)"
    return ""


def local_rank(num_devices: int) -> int:
    """This process's device: the tests' own takes the first, others the second where there is one."""
    return 1 if multiprocessing.parent_process() is not None and num_devices > 1 else 0


def ascend_settings(address: str, segment_bytes: int) -> StoreSettings:
    """Of a client of the master at `address`."""
    return StoreSettings(
        master_server_address=address,
        protocol="ascend",
        local_hostname="127.0.0.1",
        global_segment_size=segment_bytes,
        local_buffer_size=BUFFER_BYTES,
    )


@cache
def npu_device() -> Any:
    """This process's NPU."""
    import torch

    from kvpool_connector.ascend import AscendDevice

    npu: Any = torch.npu  # type: ignore[attr-defined]
    return AscendDevice(local_rank(npu.device_count()))


def npu_memory() -> NpuMemory:
    """Caches on this process's NPU."""
    import torch

    device = npu_device()
    device.bind_thread()
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return NpuMemory(torch, device, f"npu:{local_rank(npu.device_count())}")


def npu_store(address: str, segment_bytes: int) -> MooncakeStore:
    """A connected client of a real master, from any process."""
    store = MooncakeStore(ascend_settings(address, segment_bytes), bind_thread=npu_device().bind_thread)
    store.connect()
    return store


@cache
def stand_in() -> tuple[Machine, Any, Transport]:
    """This process's simulated machine, `ascend.py` on it, and its transport."""
    machine = Machine(num_devices=2)
    return machine, machine.load(SOURCE), Transport(machine)


@cache
def stand_in_device() -> Any:
    """This process's simulated NPU."""
    machine, ascend, _ = stand_in()
    return ascend.AscendDevice(local_rank(machine.num_devices))


def stand_in_memory() -> NpuMemory:
    """Caches on this process's simulated NPU."""
    machine, _, _ = stand_in()
    device = stand_in_device()
    device.bind_thread()
    return NpuMemory(machine.torch, device, f"npu:{local_rank(machine.num_devices)}")


def stand_in_store(address: str, segment_bytes: int) -> MooncakeStore:
    """A connected client of a simulated master over the simulated transport, from any process."""
    _, _, transport = stand_in()
    settings = ascend_settings(address, segment_bytes)
    store = MooncakeStore(settings, module=transport, bind_thread=stand_in_device().bind_thread)
    store.connect()
    return store


def not_on_the_grid(deployment: Deployment) -> str:
    """Why a deployment is refused with protocol `ascend`; empty where it is not."""
    if deployment.transfer == "direct" and deployment.case.family == "gqa-310p":
        return "caches of a 310P start on no multiple of 2 MiB, so with protocol ascend they are moved packed"
    return ""


class NpuTarget(Target):
    """One client a process, as workers have. Objects are looked at through it too: another would take a device."""

    def __init__(self, address: str) -> None:
        super().__init__("npu", address, npu_store, LEASE_S, npu_memory, num_clients=1)

    def peek(self, key: str) -> bytes | None:
        with self.open() as store:
            status, value = store.read(key)
            return value if status.ok else None

    def poke(self, key: str, offset: int, value: bytes) -> None:
        old = self.peek(key)
        assert old is not None, f"{key!r} is not in the store"
        with self.open() as store:
            (removed,) = store.remove([key], force=True)
            changed = old[:offset] + value + old[offset + len(value) :]
            assert removed.ok and store.write(key, changed).ok, f"{key!r} could not be changed"

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)

    def offers(self, deployment: Deployment) -> str:
        return not_on_the_grid(deployment) or super().offers(deployment)


class StandInTarget(SimulatorTarget):
    """The same on the stand-in, over the simulated store."""

    def __init__(self, master: SimulatedMaster) -> None:
        super().__init__(master, "npu-stand-in", stand_in_store, stand_in_memory, num_clients=1)

    def offers(self, deployment: Deployment) -> str:
        return not_on_the_grid(deployment) or super().offers(deployment)


@contextmanager
def npu(segment_bytes: int = 2 << 30) -> Iterator[NpuTarget]:
    """Raises `RuntimeError` in words where there is no NPU."""
    reason = unreachable()
    if reason:
        raise RuntimeError(f"target npu cannot be reached: {reason}")
    master = RealMaster(segment_bytes, LEASE_S)
    try:
        master.start()
        master.start_owner(OWNER)
        target = NpuTarget(master.address)
        try:
            yield target
        finally:
            target.close()
    finally:
        master.close()


@contextmanager
def npu_stand_in(segment_bytes: int = 2 << 30) -> Iterator[StandInTarget]:
    """A simulated master with memory, and a simulated machine in every process."""
    with SimulatedMaster(serve=True) as master:
        owner = stand_in_store(master.address, segment_bytes)
        target = StandInTarget(master)
        try:
            yield target
        finally:
            target.close()
            owner.close()
