"""What the connector asks of the device that holds the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool_connector.contract.errors import KVPoolError
from kvpool_connector.contract.layout import ShardLayout

CHECKSUM_BYTES = 8
DEVICE_LIMIT_S = 10.0
"""How long anybody waits for the device's work: a save for its blocks to be written, a copy to have landed."""


class Event(Protocol):
    """A point in the device's work."""

    def wait(self, timeout_s: float) -> bool:
        """True once all work before the event has landed; False when that took longer than `timeout_s` seconds."""
        ...


class DeviceLateError(KVPoolError):
    """The device had not done its work within the limit, and may still do it.

    Raised by copies, checksums, reads and writes. Until `event` has happened, the memory that was to be written may
    change at any time.
    """

    def __init__(self, limit_s: float, event: Event | None) -> None:
        """`event`: after the late work; None where nothing was begun, since earlier work is late already."""
        begun = "its work" if event else "earlier work, so nothing more was given to it"
        super().__init__(f"the device did not finish {begun} within {limit_s:g} s")
        self.limit_s = limit_s
        self.event = event


@dataclass(frozen=True)
class Buffer:
    """Memory the device allocated for us: `[address, address + num_bytes)`, alive as long as `owner`."""

    address: int
    num_bytes: int
    owner: object


class Copier(Protocol):
    """Copies whole blocks between the cache of one layout and objects in memory, one every `stride` bytes.

    Raises `DeviceLateError`.
    """

    def gather(self, block_ids: Sequence[int], address: int) -> None:
        """Copy block `block_ids[i]` to `address + i * stride`. Returns when the bytes are there."""
        ...

    def scatter(self, block_ids: Sequence[int], address: int) -> None:
        """Copy the object at `address + i * stride` to block `block_ids[i]`. Returns when the bytes are there.

        Touches no byte outside the pages of these blocks.
        """
        ...


class Checksums(Protocol):
    """Checksums of objects of one layout where they lie: `CHECKSUM_BYTES` a component, in object order.

    Raises `DeviceLateError`.
    """

    algorithm: str
    """Name of the checksum; what was made by one is compared by no other."""

    def write(self, address: int, count: int, target: int) -> None:
        """Checksum the objects at `address + i * stride`; those of object `i` go to `target + i * stride`. Returns when
        they are there. Without a stride, objects lie dense at `address`, and checksums dense at `target`."""
        ...

    def differing(self, address: int, index: int, target: int) -> list[int]:
        """The components of object `index` whose checksum is not the one at `target`, laid out as by `write`."""
        ...


class Device(Protocol):
    """Memory, order and copies of one device."""

    def bind_thread(self) -> None:
        """Let the calling thread use the device. Cheap, and may be called again. Its copiers do so themselves."""
        ...

    def record_event(self) -> Event:
        """An event after all work that was queued until now."""
        ...

    def order_late_copies(self) -> None:
        """Let work that the calling thread queues from now on come behind copies into the cache that were given up.

        Does not wait: the order is the device's. So a block that a late copy may still write can be reused.
        """
        ...

    def allocate(self, num_bytes: int, alignment: int) -> Buffer:
        """Memory that the transport can reach, for staging. `num_bytes` and `alignment` in bytes."""
        ...

    def copier(
        self, layout: ShardLayout, kv_caches: Mapping[str, Any], staging: Buffer, stride: int | None = None
    ) -> Copier:
        """Copies between the caches of `layout`, which is read from `kv_caches`, and addresses inside `staging`.

        `stride`: bytes from one object in `staging` to the next; None where they lie dense.
        """
        ...

    def checksums(self, layout: ShardLayout, staging: Buffer, stride: int | None = None) -> Checksums:
        """Checksums of objects inside `staging`; `stride` as for `copier`."""
        ...

    def read(self, staging: Buffer, address: int, num_bytes: int) -> bytes:
        """A few bytes of `staging`, checksums for example. Raises `DeviceLateError`."""
        ...

    def write(self, staging: Buffer, address: int, data: bytes) -> None:
        """Put a few bytes into `staging`. Returns when they are there; raises `DeviceLateError`."""
        ...
