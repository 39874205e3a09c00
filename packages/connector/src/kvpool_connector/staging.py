"""The staging area: registered memory through which packed transfers pass, in chunks of equal size."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool_connector.contract.device import Device, DeviceLateError, Event
from kvpool_connector.contract.errors import ConfigError, StoreSetupError
from kvpool_connector.contract.layout import REGION_ALIGNMENT
from kvpool_connector.contract.store import Store

logger = logging.getLogger(__name__)

MIN_CHUNKS = 3
"""Two loads and one save at the same time."""


class Staging:
    """`num_chunks` chunks of `chunk_bytes` each, lent one at a time.

    A chunk whose transfer is given up stays lent until the transport has returned, and one with which the device is
    late until its work has landed: late bytes land here and nowhere else.
    """

    def __init__(self, store: Store, device: Device, num_bytes: int, max_object_bytes: int) -> None:
        """Allocate and register. Raises `ConfigError` when `num_bytes` cannot hold `MIN_CHUNKS` objects."""
        num_chunks = max(MIN_CHUNKS, min(16, num_bytes // max(max_object_bytes, 16 << 20)))
        self.chunk_bytes = num_bytes // num_chunks
        if self.chunk_bytes < max_object_bytes:
            raise ConfigError(
                f"staging_bytes = {num_bytes} is too small: an object of this layout has {max_object_bytes} bytes and "
                f"{num_chunks} must fit; set staging_bytes to at least {num_chunks * max_object_bytes}"
            )
        self.buffer = device.allocate(num_chunks * self.chunk_bytes, REGION_ALIGNMENT)
        status = store.register(self.buffer.address, self.buffer.num_bytes)
        if not status.ok:
            raise StoreSetupError(
                f"the store did not register the staging area of {self.buffer.num_bytes} bytes: {status}"
            )
        # The chunk that was used last is lent first: its pages are there, and in the processor's cache.
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        self._num_chunks = num_chunks
        self._late: list[tuple[int, Event, float]] = []
        """Chunks that the device may still write, and read, until the event; and the limit that has passed."""
        self._lock = threading.Lock()
        for index in range(num_chunks):
            self._free.put(self.buffer.address + index * self.chunk_bytes)

    @contextmanager
    def chunk(self, timeout_s: float) -> Iterator[int | None]:
        """The address of a free chunk, or None when none came free within `timeout_s` seconds.

        A `DeviceLateError` that leaves the block keeps the chunk back. One is raised when all chunks are kept back.
        """
        self._take_back()
        try:
            address = self._free.get(timeout=timeout_s)
        except queue.Empty:
            yield None
            return
        late: DeviceLateError | None = None
        try:
            yield address
        except DeviceLateError as error:
            late = error
            raise
        finally:
            if late is None or late.event is None:
                self._free.put(address)
            else:
                with self._lock:
                    self._late.append((address, late.event, late.limit_s))

    def _take_back(self) -> None:
        """Chunks whose late work has landed are free again."""
        with self._lock:
            for chunk in [chunk for chunk in self._late if chunk[1].wait(0)]:
                self._late.remove(chunk)
                self._free.put(chunk[0])
                logger.warning("event=device_landed: late work has landed, and its part of the staging area is free")
            if len(self._late) == self._num_chunks:
                raise DeviceLateError(self._late[-1][2], None)
