"""The master: which objects there are, where their bytes lie, who may remove what. It never touches a byte.

Semantics are of Mooncake 0.3.13.post1 over TCP, as measured; `docs/mooncake-semantics.md` lists them claim by claim.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence

from kvpool_connector.contract.clock import Clock
from kvpool_simulator.store import codes
from kvpool_simulator.store.eviction import EvictionQueue
from kvpool_simulator.store.objects import Lookup, StoredObject
from kvpool_simulator.store.options import MasterOptions, ReplicateConfig, SoftPinAction
from kvpool_simulator.store.segment import Owner, Replica, Segment
from kvpool_simulator.store.segments import REMOUNT_S, Segments
from kvpool_simulator.store.space import Space
from kvpool_simulator.store.upkeep import Upkeep

Started = tuple[int, tuple[Replica, ...]]


class Master:
    """State of one master. Every method is atomic, and begins with what the master's own threads did meanwhile."""

    def __init__(self, clock: Clock, options: MasterOptions, seed: int = 0) -> None:
        self.clock = clock
        self.options = options
        self.segments = Segments(seed)
        self._lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.queue = EvictionQueue()
        self.writing: dict[StoredObject, None] = {}
        """Unfinished writes, oldest first."""
        self.discarded: list[tuple[float, StoredObject]] = []
        """Writes that lost their key; their space comes back at the time noted."""
        self.num_evictable = 0
        self.num_evicted = 0
        self.space_wanted = False
        self._groups: dict[str, set[StoredObject]] = {}
        self._upkeep = Upkeep(self, self.clock.now())

    def now(self) -> float:
        """The master's time, in seconds."""
        return float(self.clock.now())

    # Clients and segments

    def mount(self, name: str, endpoint: str, client: int, path: str, capacity: int) -> None:
        """A client gives memory."""
        with self._lock:
            self.segments.add(Segment(name, endpoint, client, path, Space(capacity)))

    def unmount(self, client: int) -> None:
        """A client leaves: its segments, and what lies in them alone, are gone."""
        with self._lock:
            for segment in self.segments.of(client):
                self.drop_segment(segment)
            self.segments.forget(client)

    def drop_segment(self, segment: Segment) -> None:
        """Forget a segment and what lies in it alone."""
        self.segments.drop(segment)
        if segment.space.empty:
            return
        for found in [o for o in self.objects.values() if any(s is segment for s, _ in o.places)]:
            found.places = [place for place in found.places if place[0] is not segment]
            if not found.places:
                self.drop(found)
        for _, found in self.discarded:
            found.places = [place for place in found.places if place[0] is not segment]

    def set_owner(self, client: int, state: Owner) -> None:
        """A client dies or hangs: until the master notices, its objects are listed. A hung one may go on."""
        with self._lock:
            self._upkeep.catch_up()
            self.segments.set_owner(client, state, self.now())

    def report_gone(self, name: str) -> None:
        """A client cannot reach a segment's memory: the process that owned it has ended."""
        with self._lock:
            segment = self.segments.get(name)
            if segment is not None and segment.owner is Owner.ALIVE:
                segment.owner, segment.silent_since = Owner.DEAD, self.now()

    def lose_all(self) -> None:
        """The master has restarted: it knows no object, and segments come back by themselves."""
        with self._lock:
            self._clear()
            for segment in self.segments:
                segment.mount_again(self.now() + REMOUNT_S)

    # Writing

    def put_start(
        self, keys: Sequence[str], sizes: Sequence[int], client: int, config: ReplicateConfig, upsert: bool = False
    ) -> list[Started]:
        """Reserve space: `OK`, `OBJECT_ALREADY_EXISTS`, `NO_AVAILABLE_HANDLE` or `INVALID_PARAMS` for each key.

        With `upsert` an object or an unfinished write that is there makes way.
        """
        with self._lock:
            self._upkeep.catch_up()
            if refusal := config.refusal(len(keys), self.options.max_kv_soft_pin_ttl_ms):
                return [(refusal, ())] * len(keys)
            groups = config.group_ids or [""] * len(keys)
            started: list[Started] = []
            for key, size, group in zip(keys, sizes, groups, strict=True):
                found = self._start(key, size, client, config, group, upsert)
                started.append((found, ()) if isinstance(found, int) else (codes.OK, found.replicas()))
            return started

    def _start(
        self, key: str, num_bytes: int, client: int, config: ReplicateConfig, group: str, upsert: bool
    ) -> StoredObject | int:
        now = self.now()
        if not key or num_bytes <= 0:
            return codes.INVALID_PARAMS
        existing = self.objects.get(key)
        if existing is not None and upsert and existing.complete and existing.num_bytes == num_bytes:
            # In place: the lease stays, and readers with a session see the new bytes.
            self._reopen(existing, client, now)
            self._pin(existing, config, now)
            return existing
        if existing is not None:
            overdue = now - existing.started > self.options.put_start_discard_timeout_sec
            if not upsert and (existing.complete or not overdue):
                return codes.OBJECT_ALREADY_EXISTS
            # Readers may still be at the old object, and its writer at the unfinished one.
            began = now if existing.complete else existing.started
            self.discard(existing, began)
        places = self.segments.place(num_bytes, config, now)
        if not places:
            self.space_wanted = True
            return codes.NO_AVAILABLE_HANDLE
        made = StoredObject(key, num_bytes, client, now, places, hard_pin=config.with_hard_pin)
        if group:
            made.group = group
            self._groups.setdefault(group, set()).add(made)
        self._pin(made, config, now)
        self.objects[key] = made
        self.writing[made] = None
        return made

    def _reopen(self, found: StoredObject, client: int, now: float) -> None:
        found.complete, found.client, found.started = False, client, now
        self.num_evictable -= not found.hard_pin
        self.writing[found] = None

    def _pin(self, found: StoredObject, config: ReplicateConfig, now: float) -> None:
        if config.soft_pin_action is SoftPinAction.ENABLE:
            own = config.soft_pin_ttl_ms
            found.soft_pin_end = now + (self.options.default_kv_soft_pin_ttl_ms if own is None else own) / 1000
        elif config.soft_pin_action is SoftPinAction.DISABLE:
            found.soft_pin_end = 0.0

    def put_end(self, keys: Sequence[str], client: int) -> list[int]:
        """Make objects visible: `OK`, `OBJECT_NOT_FOUND`, or `ILLEGAL_CLIENT` for what another took over."""
        with self._lock:
            self._upkeep.catch_up()
            return [self._of(key, client, self._complete) for key in keys]

    def put_revoke(self, keys: Sequence[str], client: int) -> list[int]:
        """Give writes up: keys and space are free at once. `INVALID_WRITE` for what is complete by now."""
        with self._lock:
            self._upkeep.catch_up()
            return [self._of(key, client, self._revoke) for key in keys]

    def _of(self, key: str, client: int, act: Callable[[StoredObject], int]) -> int:
        found = self.objects.get(key)
        if found is None:
            return codes.OBJECT_NOT_FOUND
        return act(found) if found.client == client else codes.ILLEGAL_CLIENT

    def _complete(self, found: StoredObject) -> int:
        if not found.complete:
            found.complete = True
            self.writing.pop(found, None)
            self.num_evictable += not found.hard_pin
            self.queue.use(found, max(found.lease_end, self.now()))
        return codes.OK

    def _revoke(self, found: StoredObject) -> int:
        if found.complete:
            return codes.INVALID_WRITE
        self.drop(found)
        return codes.OK

    # Reading

    def query(self, keys: Sequence[str]) -> list[Lookup]:
        """Where objects are. Grants or extends the lease of each, and of its group."""
        with self._lock:
            self._upkeep.catch_up()
            return [self._query(key) for key in keys]

    def _query(self, key: str) -> Lookup:
        found = self.objects.get(key)
        if found is None:
            return Lookup(codes.OBJECT_NOT_FOUND)
        if not found.complete:
            return Lookup(codes.REPLICA_IS_NOT_READY)
        self._grant(found)
        return Lookup(codes.OK, found.num_bytes, found.replicas(), found.lease_end)

    def exist(self, keys: Sequence[str]) -> list[int]:
        """1 for each object that can be read (a lease is granted), else 0."""
        with self._lock:
            self._upkeep.catch_up()
            answers = []
            for key in keys:
                found = self.objects.get(key)
                there = found is not None and found.complete
                if there and found is not None:
                    self._grant(found)
                answers.append(int(there))
            return answers

    def _grant(self, found: StoredObject) -> None:
        end = self.now() + self.options.default_kv_lease_ttl_ms / 1000
        for one in self._groups[found.group] if found.group else (found,):
            if one.complete:
                one.lease_end = max(one.lease_end, end)
                self.queue.use(one, one.lease_end)

    def keys(self) -> list[str]:
        """All readable keys; grants nothing."""
        with self._lock:
            self._upkeep.catch_up()
            return [key for key, found in self.objects.items() if found.complete]

    def peek(self, key: str) -> Lookup:
        """Like `query`, without a lease; for tests."""
        with self._lock:
            self._upkeep.catch_up()
            found = self.objects.get(key)
            if found is None or not found.complete:
                return Lookup(codes.OBJECT_NOT_FOUND)
            return Lookup(codes.OK, found.num_bytes, found.replicas(), found.lease_end)

    # Removing

    def remove(self, keys: Sequence[str], force: bool) -> list[int]:
        """Remove readable objects; a lease forbids it unless `force`. Pins do not protect."""
        with self._lock:
            self._upkeep.catch_up()
            return [self._remove(self.objects.get(key), force) for key in keys]

    def _remove(self, found: StoredObject | None, force: bool) -> int:
        if found is None:
            return codes.OBJECT_NOT_FOUND
        if not found.complete:
            return codes.REPLICA_IS_NOT_READY
        if not force and found.lease_end > self.now():
            return codes.OBJECT_HAS_LEASE
        self.drop(found)
        return codes.OK

    def remove_matching(self, pattern: str, force: bool) -> int:
        """Remove readable objects whose key the pattern is found in; the number removed, or `INVALID_PARAMS`."""
        # The store's patterns are ECMAScript's, which have no named groups.
        if "(?P" in pattern:
            return codes.INVALID_PARAMS
        try:
            compiled = re.compile(pattern)
        except re.error:
            return codes.INVALID_PARAMS
        with self._lock:
            self._upkeep.catch_up()
            matching = [o for key, o in self.objects.items() if compiled.search(key)]
            return sum(self._remove(found, force) == codes.OK for found in matching)

    def clear_replicas(self, keys: Sequence[str], client: int, segment: str) -> list[str]:
        """Remove what `client` itself put and nobody has leased, on one segment or all; the keys that this befell."""
        with self._lock:
            self._upkeep.catch_up()
            return [key for key in keys if self._clear_replica(self.objects.get(key), client, segment)]

    def _clear_replica(self, found: StoredObject | None, client: int, segment: str) -> bool:
        if found is None or not found.complete or found.client != client or found.lease_end > self.now():
            return False
        cleared = [(s, offset) for s, offset in found.places if segment in ("", s.name)]
        for place in cleared:
            place[0].space.free(place[1], found.num_bytes)
            found.places.remove(place)
        if not found.places:
            self.drop(found)
        return bool(cleared)

    # What upkeep does too

    def drop(self, found: StoredObject) -> None:
        """An object is gone, and its space is free."""
        self._forget(found)
        found.release()

    def discard(self, found: StoredObject, began: float) -> None:
        """An object loses its key, while somebody may still be at its bytes: its space is kept for a while."""
        self._forget(found)
        self.discarded.append((began + self.options.put_start_release_timeout_sec, found))

    def _forget(self, found: StoredObject) -> None:
        del self.objects[found.key]
        self.num_evictable -= found.complete and not found.hard_pin
        self.writing.pop(found, None)
        self.queue.forget(found)
        if found.group:
            self._groups[found.group].discard(found)
            if not self._groups[found.group]:
                del self._groups[found.group]
