"""What the master knows of an object."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_simulator.store.segment import Replica, Segment


@dataclass(eq=False, slots=True)
class StoredObject:
    """An object, readable or being written."""

    key: str
    num_bytes: int
    client: int
    """Who wrote it, or is writing."""
    started: float
    """When the write began."""
    places: list[tuple[Segment, int]]
    """Of each replica: segment and offset."""
    complete: bool = False
    lease_end: float = 0.0
    hard_pin: bool = False
    soft_pin_end: float = 0.0
    group: str | None = None
    last_use: float = 0.0
    """What eviction goes by: the lease's end, or the time of the put for what was never read."""
    touched: int = 0
    """Orders uses at the same time."""
    queued: bool = False
    gone: bool = False

    def replicas(self) -> tuple[Replica, ...]:
        """Where its bytes are, for clients."""
        return tuple(
            Replica(s.name, s.endpoint, s.path, s.space.capacity, offset, self.num_bytes, s.owner)
            for s, offset in self.places
        )

    def release(self) -> None:
        """Give its space back."""
        for segment, offset in self.places:
            segment.space.free(offset, self.num_bytes)
        self.places = []


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer to a query: a code, and the rest when it is `OK`."""

    code: int
    num_bytes: int = 0
    replicas: tuple[Replica, ...] = ()
    lease_end: float = 0.0
