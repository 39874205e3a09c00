"""The staging area: registered memory through which packed transfers pass, in chunks of equal size."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool_connector.contract.device import Device
from kvpool_connector.contract.errors import ConfigError, StoreSetupError
from kvpool_connector.contract.layout import REGION_ALIGNMENT
from kvpool_connector.contract.store import Store

MIN_CHUNKS = 3
"""Two loads and one save at the same time."""


class Staging:
    """`num_chunks` chunks of `chunk_bytes` each, lent one at a time.

    A chunk whose transfer is given up stays lent until the transport has returned: late bytes land here and nowhere
    else.
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
        for index in range(num_chunks):
            self._free.put(self.buffer.address + index * self.chunk_bytes)

    @contextmanager
    def chunk(self, timeout_s: float) -> Iterator[int | None]:
        """The address of a free chunk, or None when none came free within `timeout_s` seconds."""
        try:
            address = self._free.get(timeout=timeout_s)
        except queue.Empty:
            yield None
            return
        try:
            yield address
        finally:
            self._free.put(address)
