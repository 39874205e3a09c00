"""Devices of the simulated cluster as the connector sees them: copies in turn with others, events that may be late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpool_connector.contract.device import Buffer, Checksums, Copier
from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.host import HostDevice
from kvpool_simulator.device import Event
from kvpool_simulator.engine import Faults, Tasks

LATEST_S = 15.0


class LateEvent:
    """An event that is seen only a while after it has happened."""

    def __init__(self, event: Event, late_s: float) -> None:
        self._event = event
        self._late_s = late_s

    def wait(self, timeout_s: float) -> bool:
        if self._late_s >= timeout_s:
            self._event.wait(timeout_s)
            return False
        return self._event.wait(timeout_s - self._late_s)


class SimulatedDevice:
    """One rank's device. `record` gives an event after all work that the engine has queued."""

    def __init__(self, tasks: Tasks, record: Callable[[], Event], faults: Faults) -> None:
        self._host = HostDevice()
        self._tasks = tasks
        self._record = record
        self._faults = faults

    def bind_thread(self) -> None:
        self._host.bind_thread()

    def record_event(self) -> Any:
        event = self._record()
        if self._faults.strikes("device_late"):
            return LateEvent(event, self._faults.stream("device_late-how").uniform(0.0, LATEST_S))
        return event

    def order_late_copies(self) -> None:
        self._host.order_late_copies()

    def allocate(self, num_bytes: int, alignment: int) -> Buffer:
        return self._host.allocate(num_bytes, alignment)

    def copier(
        self, layout: ShardLayout, kv_caches: Mapping[str, Any], staging: Buffer, stride: int | None = None
    ) -> Copier:
        return SharedCopier(self._host.copier(layout, kv_caches, staging, stride), self._tasks)

    def checksums(self, layout: ShardLayout, staging: Buffer, stride: int | None = None) -> Checksums:
        return self._host.checksums(layout, staging, stride)

    def read(self, staging: Buffer, address: int, num_bytes: int) -> bytes:
        return self._host.read(staging, address, num_bytes)

    def write(self, staging: Buffer, address: int, data: bytes) -> None:
        self._host.write(staging, address, data)


class SharedCopier:
    """A copier before and after whose copies others may go on."""

    def __init__(self, copier: Copier, tasks: Tasks) -> None:
        self._copier = copier
        self._tasks = tasks

    def gather(self, block_ids: Sequence[int], address: int) -> None:
        self._tasks.pause()
        self._copier.gather(block_ids, address)
        self._tasks.pause()

    def scatter(self, block_ids: Sequence[int], address: int) -> None:
        self._tasks.pause()
        self._copier.scatter(block_ids, address)
        self._tasks.pause()
