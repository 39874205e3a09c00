"""KV cache on an Ascend NPU. The only file that imports torch_npu.

Its names are checked against the sources inside torch-npu 2.9.1 and 2.14.0. All of it runs on the stand-in
`kvpool_simulator.npu`, none of it has run on an NPU yet: see docs/npu.md.

A thread has a device of its own and inherits none, so whoever uses the device selects it first.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu  # noqa: F401  (its import makes torch.npu)

from kvpool_connector.contract.device import CHECKSUM_BYTES, DEVICE_LIMIT_S, Buffer, DeviceLateError
from kvpool_connector.contract.errors import ConfigError, LayoutError
from kvpool_connector.contract.layout import ShardLayout

POLL_S = 0.0005
npu: Any = torch.npu  # type: ignore[attr-defined]


class AscendEvent:
    """A recorded event whose wait has a limit."""

    def __init__(self) -> None:
        """Record on the current stream."""
        self._event = npu.Event()
        self._event.record()

    def wait(self, timeout_s: float) -> bool:
        """See `kvpool_connector.contract.device.Event`. `synchronize` has no limit, so the event is polled."""
        deadline = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def order(self) -> None:
        """Work that the calling thread queues from now on comes behind the event. The caller does not wait."""
        self._event.wait()


class _Lane:
    """A stream of ours. What it is given has landed when the block ends, or the device is late."""

    def __init__(self, index: int, limit_s: float) -> None:
        self._index = index
        self._limit_s = limit_s
        # What is read and written here must not wait for the engine's work on the default stream.
        self._stream = npu.Stream()
        self._late: AscendEvent | None = None

    @contextmanager
    def work(self, late_writes: _LateWrites | None = None) -> Iterator[None]:
        """In the block, work goes to the stream. `late_writes` is told where it writes the cache and is late.

        Nothing in the block may wait for the device: host memory is pinned, and copied without blocking. Raises
        `DeviceLateError`.
        """
        npu.set_device(self._index)
        if self._late is not None:
            # One wait for a device that hangs is enough, and a queue that fills up would block.
            if not self._late.wait(0):
                raise DeviceLateError(self._limit_s, None)
            self._late = None
        with npu.stream(self._stream):
            try:
                yield
            finally:
                event = AscendEvent()
                if not event.wait(self._limit_s):
                    self._late = event
                    if late_writes is not None:
                        late_writes.add(event)
                    raise DeviceLateError(self._limit_s, event)


class _LateWrites:
    """Copies into the cache that were given up and may still land."""

    def __init__(self) -> None:
        self._events: list[AscendEvent] = []
        self._lock = threading.Lock()

    def add(self, event: AscendEvent) -> None:
        with self._lock:
            self._events.append(event)

    def order(self) -> None:
        """See `kvpool_connector.contract.device.Device.order_late_copies`."""
        with self._lock:
            self._events = [event for event in self._events if not event.wait(0)]
            for event in self._events:
                event.order()


class AscendDevice:
    """One NPU of this process."""

    def __init__(self, index: int, limit_s: float = DEVICE_LIMIT_S) -> None:
        """`index`: local rank. `limit_s`: of each wait for a copy, in seconds.

        Raises `ConfigError` where this process sees no such device.
        """
        if not 0 <= index < npu.device_count():
            raise ConfigError(
                f"local rank {index} has no NPU: this process sees {npu.device_count()}; check "
                "ASCEND_RT_VISIBLE_DEVICES, and that no more workers run on this node than it has NPUs"
            )
        self._index = index
        self._name = f"npu:{index}"
        self._limit_s = limit_s
        self._late_writes = _LateWrites()
        self.bind_thread()
        self._lane = _Lane(index, limit_s)

    def bind_thread(self) -> None:
        """See `kvpool_connector.contract.device.Device`."""
        npu.set_device(self._index)

    def record_event(self) -> AscendEvent:
        """See `kvpool_connector.contract.device.Device`."""
        return AscendEvent()

    def order_late_copies(self) -> None:
        """See `kvpool_connector.contract.device.Device`."""
        self._late_writes.order()

    def allocate(self, num_bytes: int, alignment: int) -> Buffer:
        """Device memory; the transport wants 2 MiB starts."""
        tensor = torch.empty(num_bytes + alignment, dtype=torch.uint8, device=self._name)
        start = -(-tensor.data_ptr() // alignment) * alignment
        offset = start - tensor.data_ptr()
        return Buffer(start, num_bytes, tensor[offset : offset + num_bytes])

    def copier(
        self, layout: ShardLayout, kv_caches: Mapping[str, Any], staging: Buffer, stride: int | None = None
    ) -> AscendCopier:
        """See `kvpool_connector.contract.device.Device`."""
        lane = _Lane(self._index, self._limit_s)
        return AscendCopier(lane, self._late_writes, layout, kv_caches, staging, stride or layout.object_bytes)

    def checksums(self, layout: ShardLayout, staging: Buffer, stride: int | None = None) -> AscendChecksums:
        """See `kvpool_connector.contract.device.Device`."""
        return AscendChecksums(_Lane(self._index, self._limit_s), layout, staging, stride)

    def read(self, staging: Buffer, address: int, num_bytes: int) -> bytes:
        """See `kvpool_connector.contract.device.Device`."""
        with self._lane.work():
            found = _to_host(_bytes_of(staging, address, num_bytes))
        return found.numpy().tobytes()

    def write(self, staging: Buffer, address: int, data: bytes) -> None:
        """See `kvpool_connector.contract.device.Device`."""
        values = _pinned(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        with self._lane.work():
            _bytes_of(staging, address, len(data)).copy_(values, non_blocking=True)


def _bytes_of(staging: Buffer, address: int, num_bytes: int) -> torch.Tensor:
    memory: torch.Tensor = staging.owner  # type: ignore[assignment]
    return memory[address - staging.address :][:num_bytes]


def _pinned(values: torch.Tensor) -> torch.Tensor:
    """The values in host memory from which the device copies by itself; other copies wait, without a limit."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """The values on the host, once the work so far has landed."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class AscendChecksums:
    """Sums of each component's 64-bit words, each word times its own odd number, modulo 2**64, made on the device.

    An odd factor keeps every flipped bit in the sum; factors that differ notice words in other places.
    """

    algorithm = "sum-64"

    def __init__(self, lane: _Lane, layout: ShardLayout, staging: Buffer, stride: int | None) -> None:
        self._stride = stride or layout.object_bytes
        self._sums_stride = stride or CHECKSUM_BYTES * len(layout.components)
        self._sizes = [component.page_bytes for component in layout.components]
        self._staging = staging
        self._memory: torch.Tensor = staging.owner  # type: ignore[assignment]
        self._lane = lane
        words = -(-max(self._sizes) // CHECKSUM_BYTES)
        # On the stream that reads them: nothing else orders their making before.
        with self._lane.work():
            self._factors = torch.arange(words, dtype=torch.int64, device=self._memory.device) * 2 + 1

    def write(self, address: int, count: int, target: int) -> None:
        """See `kvpool_connector.contract.device.Checksums`."""
        with self._lane.work():
            for i in range(count):
                self._stored(i, target).copy_(self._sums(address, i).view(torch.uint8))

    def differing(self, address: int, index: int, target: int) -> list[int]:
        """See `kvpool_connector.contract.device.Checksums`."""
        with self._lane.work():
            stored = self._stored(index, target).clone().view(torch.int64)
            found = _to_host(stored != self._sums(address, index))
        return [k for k, differs in enumerate(found.tolist()) if differs]

    def _stored(self, index: int, target: int) -> torch.Tensor:
        size = CHECKSUM_BYTES * len(self._sizes)
        start = target - self._staging.address + index * self._sums_stride
        return self._memory[start : start + size]

    def _sums(self, address: int, index: int) -> torch.Tensor:
        start = address - self._staging.address + index * self._stride
        sums = []
        for size in self._sizes:
            # Pages begin anywhere and end anywhere; words are read from a copy that is filled up with zeros.
            page = self._memory[start : start + size]
            start += size
            whole = torch.nn.functional.pad(page, (0, -page.numel() % CHECKSUM_BYTES)).clone().view(torch.int64)
            sums.append((whole * self._factors[: whole.numel()]).sum())
        return torch.stack(sums)


class AscendCopier:
    """Copies on a stream of its own, a component of all blocks at a time."""

    def __init__(
        self,
        lane: _Lane,
        late_writes: _LateWrites,
        layout: ShardLayout,
        kv_caches: Mapping[str, Any],
        staging: Buffer,
        stride: int,
    ) -> None:
        self._lane = lane
        self._late_writes = late_writes
        self._object_bytes = layout.object_bytes
        self._stride = stride
        self._staging = staging
        self._memory: torch.Tensor = staging.owner  # type: ignore[assignment]
        self._pages = list(_pages(layout, kv_caches))

    def gather(self, block_ids: Sequence[int], address: int) -> None:
        """See `kvpool_connector.contract.device.Copier`."""
        numbers = _pinned(torch.tensor(block_ids))
        with self._lane.work():
            ids, objects = self._tensors(numbers, address)
            for part, pages in self._pages:
                objects[:, part].view(-1, *pages.shape[1:]).copy_(pages.index_select(0, ids))

    def scatter(self, block_ids: Sequence[int], address: int) -> None:
        """See `kvpool_connector.contract.device.Copier`."""
        numbers = _pinned(torch.tensor(block_ids))
        with self._lane.work(self._late_writes):
            ids, objects = self._tensors(numbers, address)
            for part, pages in self._pages:
                pages.index_copy_(0, ids, objects[:, part].contiguous().view(-1, *pages.shape[1:]))

    def _tensors(self, numbers: torch.Tensor, address: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, strides = (len(numbers), self._object_bytes), (self._stride, 1)
        objects = self._memory.as_strided(
            shape, strides, self._memory.storage_offset() + address - self._staging.address
        )
        ids = torch.empty(numbers.shape, dtype=numbers.dtype, device=self._memory.device)
        return ids.copy_(numbers, non_blocking=True), objects


def _pages(layout: ShardLayout, kv_caches: Mapping[str, Any]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Each component's part of an object and its pages, a byte view `(num_blocks, num_pieces, piece_bytes)`."""
    storages: dict[int, torch.Tensor] = {}
    for entry in kv_caches.values():
        for tensor in entry if isinstance(entry, tuple | list) else (entry,):
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    starts = sorted(storages)
    end = 0
    for c in layout.components:
        # One of several shards begins inside a tensor, so the storage is what is looked for.
        at = bisect.bisect(starts, c.base_address) - 1
        storage = storages[starts[at]].untyped_storage() if at >= 0 else None
        if storage is None or c.base_address >= storage.data_ptr() + storage.nbytes():
            raise LayoutError(f"component {c.name!r} at {c.base_address:#x} is in the memory of no registered tensor")
        raw = torch.empty(0, dtype=torch.uint8, device=storages[starts[at]].device)
        raw.set_(storage)
        start, end = end, end + c.page_bytes
        shape, strides = (layout.num_blocks, c.num_pieces, c.piece_bytes), (c.block_stride, c.piece_stride, 1)
        yield slice(start, end), raw.as_strided(shape, strides, c.base_address - storage.data_ptr())
