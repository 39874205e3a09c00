"""What a store answers for one key: operating failures are values, one status a key."""

from collections.abc import Sequence
from enum import Enum


class Status(Enum):
    """Outcome of one operation on one key."""

    OK = "ok"
    """Done: stored, loaded with exactly the asked bytes, present, or removed."""
    MISS = "miss"
    """No such object."""
    EXISTS = "exists"
    """The object is there already; nothing was written."""
    LEASED = "leased"
    """A reader holds a lease, so the object was not removed."""
    LEASE_EXPIRED = "lease_expired"
    """The lease ran out during a read. The destination is dirty."""
    NO_SPACE = "no_space"
    """The store has no room now."""
    NOT_READY = "not_ready"
    """Another client is still writing the object."""
    CORRUPT = "corrupt"
    """The object is not what its key promises (other size, short read, bad checksum). The destination is dirty."""
    INVALID = "invalid"
    """The store refused the arguments. Nothing was written."""
    TIMEOUT = "timeout"
    """No answer within the limit. The destination is dirty until the transport has returned."""
    WITHDRAWN = "withdrawn"
    """The blocks were needed otherwise before they were touched. Of the store it says nothing."""
    DEVICE_LATE = "device_late"
    """The device had not copied the blocks within its limit. Of the store it says nothing. The destination is dirty."""
    UNAVAILABLE = "unavailable"
    """The store, the owner of the bytes or the transport failed. The destination is dirty."""

    @property
    def ok(self) -> bool:
        """True for `OK` alone."""
        return self is Status.OK

    @property
    def stored(self) -> bool:
        """True when, after a put, the object counts as present (written now or before)."""
        return self in (Status.OK, Status.EXISTS)

    @property
    def outage(self) -> bool:
        """True when the status speaks of the store's health, not of the key."""
        return self in OUTAGES


OUTAGES = (Status.TIMEOUT, Status.UNAVAILABLE)


def num_outages(statuses: Sequence[Status]) -> int:
    """How many of them speak of the store's health; lookups have thousands."""
    known = statuses.count(Status.OK) + statuses.count(Status.MISS)
    return sum(map(statuses.count, OUTAGES)) if known < len(statuses) else 0
