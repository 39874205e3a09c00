"""What the connector asks of a store of objects.

An object is a run of bytes under a key; it is written once, whole, and read whole. Memory is named by address: the
caller keeps it alive until the call has returned, and, after `Status.TIMEOUT`, until the store says that the transport
is done with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvpool_connector.contract.layout import Region
from kvpool_connector.contract.status import Status

Pieces = Sequence[Sequence[int]]


class Store(Protocol):
    """A shared store of objects. Every method but `close` may be called from several threads at once.

    Lists go by key: `addresses[i]` and `sizes[i]` are the pieces of the object `keys[i]`, in object order. Every method
    returns exactly one status a key, in order, and raises only on misuse (`StoreClosedError`, `TypeError`).
    """

    def register(self, address: int, num_bytes: int) -> Status:
        """Make `[address, address + num_bytes)` known to the transport."""
        ...

    def unregister(self, address: int) -> Status:
        """Forget the region that was registered at exactly `address`."""
        ...

    def exist(self, keys: Sequence[str]) -> list[Status]:
        """`OK` for an object that can be read now, `MISS` for one that cannot. May be stale at once."""
        ...

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        """Store each object from its pieces. `OK` or `EXISTS` promise nothing about a concurrent writer of that key."""
        ...

    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        """Fill the pieces of each object. Only `OK` promises the object's bytes; otherwise the pieces are dirty."""
        ...

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        """Remove objects; `force` ignores leases of readers."""
        ...

    def write(self, key: str, value: bytes, *, pinned: bool = False) -> Status:
        """Store a small value; never replaces one. What is `pinned` is not evicted, only removed by a caller."""
        ...

    def read(self, key: str) -> tuple[Status, bytes]:
        """Read a small value; the bytes are empty unless the status is `OK`."""
        ...

    def close(self) -> None:
        """Give back this client's memory and connections. Idempotent."""
        ...


@runtime_checkable
class CacheStore(Store, Protocol):
    """A store that has rules of its own for the memory of a KV cache."""

    def register_shared(self, regions: Sequence[Region]) -> bool:
        """Whether a KV cache, regions that share no byte, is registered now for all who use it in this process.

        Where it is not, each region is left to `register`. Raises `StoreSetupError` for what the transport does not
        take.
        """
        ...


@runtime_checkable
class SessionStore(Store, Protocol):
    """A store whose objects may also be written and read part by part: what moving layer by layer needs.

    A put session reserves an object that nobody sees until it is ended. The store does not check that all of it was
    written: that is the caller's to know. A session that is older than the store's discard time-out may lose its key
    to another writer, and one older than the release time-out no longer owns the memory it writes to: **no range may
    be written then**. A get session protects its object from removal until the store's lease runs out.

    Ranges go by key: `addresses[i]`, `sizes[i]` and `offsets[i]` are pieces of memory and where in the object
    `keys[i]` each lies, in bytes. Ranges of one object may be moved from several threads at once.
    """

    def begin_put(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Status]:
        """Reserve objects of `sizes` bytes. `EXISTS` for a key that is stored, or being written by anybody."""
        ...

    def put_ranges(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, offsets: Pieces) -> list[Status]:
        """Write parts of open objects. Only `OK` promises that every asked byte was written."""
        ...

    def end_put(self, keys: Sequence[str]) -> list[Status]:
        """Make open objects visible. Anything but `OK`: not stored by this session."""
        ...

    def revoke_put(self, keys: Sequence[str]) -> list[Status]:
        """Give open objects up; keys and space are free at once. Writes nothing."""
        ...

    def begin_get(self, keys: Sequence[str]) -> list[Status]:
        """Open objects for reading, or renew the protection of open ones."""
        ...

    def get_ranges(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces, offsets: Pieces) -> list[Status]:
        """Read parts of open objects. Only `OK` promises the bytes; otherwise the pieces are dirty."""
        ...

    def end_get(self, keys: Sequence[str]) -> None:
        """Close objects that were open for reading; what was not open is nothing to say."""
        ...
