"""`MooncakeDistributedStore`, simulated: Mooncake's names, arguments and return codes."""

from __future__ import annotations

from kvpool_simulator.store import codes
from kvpool_simulator.store.arguments import boolean, text, texts
from kvpool_simulator.store.calls import call
from kvpool_simulator.store.descriptors import Descriptor, MemoryDescriptor, ReplicaDescriptor, ReplicaStatus
from kvpool_simulator.store.segment import Replica
from kvpool_simulator.store.sessions import Sessions
from kvpool_simulator.store.values import Values


class MooncakeDistributedStore(Values, Sessions):
    """One client of a simulated master.

    What would crash a process with the real store raises `WouldCrashError`: most calls before `setup` and after
    `close`, and unmapped local memory. Every call may also return -900 (the master is down) or -901 (it hangs).
    """

    @call()
    def is_exist(self, key: str, /) -> int:
        """1, 0 or a code; grants a lease."""
        return self._ask_each("exist", [text(key)])[0]

    @call()
    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        """1, 0 or a code for each key; grants leases."""
        return self._ask_each("exist", texts(keys))

    @call()
    def get_size(self, key: str, /) -> int:
        """Bytes, or a code; grants a lease."""
        (found,) = self._query([text(key)])
        return found.num_bytes if found.code == codes.OK else found.code

    @call()
    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Where an object's replicas are; empty for what cannot be read. Grants a lease."""
        (found,) = self._query([text(key)])
        return [self._describe(replica) for replica in found.replicas]

    @call()
    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The same by key; what cannot be read is left out."""
        names = texts(keys)
        found = zip(names, self._query(names), strict=True)
        return {name: [self._describe(replica) for replica in one.replicas] for name, one in found if one.replicas}

    @call()
    def remove(self, key: str, force: bool = False) -> int:
        """0 or a code."""
        return self._ask_each("remove", [text(key)], boolean(force))[0]

    @call()
    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        """0 or a code for each key."""
        return self._ask_each("remove", texts(keys), boolean(force))

    @call()
    def remove_all(self, force: bool = False) -> int:
        """The number removed, or a code."""
        return int(self._ask("remove_matching", "", boolean(force)))

    @call()
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """The number removed of keys that the pattern is found in, or a code."""
        return int(self._ask("remove_matching", text(regex_pattern), boolean(force)))

    @call(lambda *_, **__: [])
    def batch_replica_clear(self, keys: list[str], segment_name: str = "") -> list[str]:
        """Remove replicas of what this client put and nobody has leased; the keys that this befell."""
        cleared = self._ask("clear_replicas", texts(keys), self._client, text(segment_name))
        return [] if isinstance(cleared, int) else list(cleared)

    def _describe(self, replica: Replica) -> ReplicaDescriptor:
        # A stand-in for the address in the owner's process, which means nothing elsewhere.
        where = Descriptor(replica.num_bytes, replica.endpoint, BASE_ADDRESS + replica.offset)
        return ReplicaDescriptor(ReplicaStatus.COMPLETE, MemoryDescriptor(where))


BASE_ADDRESS = 0x7F00_0000_0000
