"""The master: which objects there are, where their bytes lie, who may remove what. It never touches a byte.

Semantics are of Mooncake 0.3.13.post1 over TCP, as measured; `docs/mooncake-semantics.md` lists them claim by claim.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import re
import threading
from dataclasses import dataclass, field
from typing import Protocol

from kvpool_simulator.store import codes
from kvpool_simulator.store.options import MasterOptions, ReplicateConfig, SoftPinAction
from kvpool_simulator.store.space import Space

EVICTION_PERIOD_S = 0.010


class Clock(Protocol):
    """Seconds that never go back."""

    def now(self) -> float: ...


@dataclass(frozen=True)
class Replica:
    """Where an object's bytes are."""

    segment: str
    path: str
    """File of the segment's memory."""
    capacity: int
    offset: int
    num_bytes: int
    owner_alive: bool = True


@dataclass
class _Segment:
    name: str
    client: int
    path: str
    space: Space
    alive: bool = True


@dataclass
class _Object:
    num_bytes: int
    client: int
    started: float
    places: list[tuple[_Segment, int]]
    complete: bool = False
    lease_end: float = 0.0
    last_use: float = 0.0
    """What eviction orders by: the lease's end, or the time of the put for what was never read."""
    hard_pin: bool = False
    soft_pin_end: float = 0.0


@dataclass(frozen=True)
class Lookup:
    """Answer to a query: a code, and the replicas when it is `OK`."""

    code: int
    num_bytes: int = 0
    replicas: tuple[Replica, ...] = ()
    lease_end: float = 0.0


@dataclass
class Master:
    """State of one master. Every method is atomic."""

    clock: Clock
    options: MasterOptions = field(default_factory=MasterOptions)
    seed: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: dict[str, _Object] = {}
        self._segments: dict[str, _Segment] = {}
        self._queue: list[tuple[float, int, str]] = []
        self._sequence = itertools.count()
        self._random = random.Random(self.seed)
        self._last_eviction = -math.inf
        self._space_wanted = False
        self._abandoned: list[tuple[float, _Object]] = []
        self.running = True
        self.evicted = 0

    def now(self) -> float:
        """The master's time, in seconds."""
        return self.clock.now()

    # Clients and segments

    def mount(self, name: str, client: int, path: str, capacity: int) -> None:
        """A client gives memory."""
        with self._lock:
            self._segments[name] = _Segment(name, client, path, Space(capacity))

    def unmount(self, client: int) -> None:
        """A client leaves: its segment and all that lies in it alone are gone."""
        with self._lock:
            for name in [s.name for s in self._segments.values() if s.client == client]:
                segment = self._segments.pop(name)
                for key, found in list(self._objects.items()):
                    found.places = [place for place in found.places if place[0] is not segment]
                    if not found.places:
                        del self._objects[key]

    def lose_owner(self, client: int) -> None:
        """A client dies: until the master notices, its objects are listed but cannot be moved."""
        with self._lock:
            for segment in self._segments.values():
                if segment.client == client:
                    segment.alive = False

    def lose_all(self) -> None:
        """The master restarts: it remembers nothing, though segments stay mounted."""
        with self._lock:
            self._objects.clear()
            self._queue.clear()
            self._abandoned.clear()
            for segment in self._segments.values():
                segment.space = Space(segment.space.capacity)

    # Writing

    def put_start(
        self, key: str, num_bytes: int, client: int, config: ReplicateConfig
    ) -> tuple[int, tuple[Replica, ...]]:
        """Reserve space for a new object: `OK`, `OBJECT_ALREADY_EXISTS`, `NO_AVAILABLE_HANDLE` or `INVALID_PARAMS`."""
        with self._lock:
            self._tick()
            if not key or num_bytes <= 0 or config.replica_num < 1:
                return codes.INVALID_PARAMS, ()
            existing = self._objects.get(key)
            if existing is not None:
                if existing.complete or not self._discardable(existing):
                    return codes.OBJECT_ALREADY_EXISTS, ()
                # An abandoned write: its key is free again, its space only after the release time-out.
                self._abandoned.append((existing.started + self.options.put_start_release_timeout_sec, existing))
                del self._objects[key]
            places = self._place(num_bytes, config)
            if not places:
                self._space_wanted = True
                return codes.NO_AVAILABLE_HANDLE, ()
            self._objects[key] = _Object(num_bytes, client, self.clock.now(), places, hard_pin=config.with_hard_pin)
            if config.soft_pin_action is SoftPinAction.ENABLE:
                ttl = 1_800_000 if config.soft_pin_ttl_ms is None else config.soft_pin_ttl_ms
                self._objects[key].soft_pin_end = self.clock.now() + ttl / 1000
            return codes.OK, self._replicas(self._objects[key])

    def put_end(self, key: str, client: int) -> int:
        """Make an object visible."""
        with self._lock:
            self._tick()
            found = self._objects.get(key)
            if found is None:
                return codes.OBJECT_NOT_FOUND
            if found.client != client:
                return codes.ILLEGAL_CLIENT
            found.complete = True
            self._touch(key, found, self.clock.now())
            return codes.OK

    def put_revoke(self, key: str, client: int) -> int:
        """Give up a write: key and space are free at once."""
        with self._lock:
            found = self._objects.get(key)
            if found is None:
                return codes.OBJECT_NOT_FOUND
            if found.client != client:
                return codes.ILLEGAL_CLIENT
            self._drop(key)
            return codes.OK

    def make_way(self, key: str) -> None:
        """Before an upsert: the old object or unfinished write goes, leased or not."""
        with self._lock:
            if key in self._objects:
                self._drop(key)

    # Reading

    def query(self, key: str) -> Lookup:
        """Where an object is. Grants or extends its lease."""
        with self._lock:
            self._tick()
            found = self._objects.get(key)
            if found is None:
                return Lookup(codes.OBJECT_NOT_FOUND)
            if not found.complete:
                return Lookup(codes.REPLICA_IS_NOT_READY)
            end = self.clock.now() + self.options.default_kv_lease_ttl_ms / 1000
            found.lease_end = max(found.lease_end, end)
            self._touch(key, found, found.lease_end)
            return Lookup(codes.OK, found.num_bytes, self._replicas(found), found.lease_end)

    def exist(self, key: str) -> int:
        """1 for an object that can be read (its lease is granted), else 0."""
        return 1 if self.query(key).code == codes.OK else 0

    def keys(self) -> list[str]:
        """All readable keys; grants nothing."""
        with self._lock:
            return [key for key, found in self._objects.items() if found.complete]

    def peek(self, key: str) -> Lookup:
        """Like `query`, without a lease; for tests."""
        with self._lock:
            found = self._objects.get(key)
            if found is None or not found.complete:
                return Lookup(codes.OBJECT_NOT_FOUND)
            return Lookup(codes.OK, found.num_bytes, self._replicas(found), found.lease_end)

    # Removing

    def remove(self, key: str, force: bool = False) -> int:
        """Remove a readable object; a lease forbids it unless `force`. Pins do not protect."""
        with self._lock:
            self._tick()
            found = self._objects.get(key)
            if found is None:
                return codes.OBJECT_NOT_FOUND
            if not found.complete:
                return codes.REPLICA_IS_NOT_READY
            if not force and found.lease_end > self.clock.now():
                return codes.OBJECT_HAS_LEASE
            self._drop(key)
            return codes.OK

    def remove_matching(self, pattern: str, force: bool = False) -> int:
        """Remove readable objects whose key the pattern is found in; the number removed, or `INVALID_PARAMS`."""
        try:
            compiled = re.compile(pattern)
        except re.error:
            return codes.INVALID_PARAMS
        with self._lock:
            return sum(self.remove(key, force) == codes.OK for key in list(self._objects) if compiled.search(key))

    # Inside

    @property
    def used_bytes(self) -> int:
        """Bytes that objects and unfinished writes take."""
        return sum(segment.space.used for segment in self._segments.values())

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all mounted segments."""
        return sum(segment.space.capacity for segment in self._segments.values())

    def _discardable(self, found: _Object) -> bool:
        return self.clock.now() - found.started > self.options.put_start_discard_timeout_sec

    def _place(self, num_bytes: int, config: ReplicateConfig) -> list[tuple[_Segment, int]]:
        """One place a replica, each on another segment; fewer when there are fewer segments."""
        alive = [segment for segment in self._segments.values() if segment.alive]
        self._random.shuffle(alive)
        wanted = [config.preferred_segment] if config.preferred_segment else config.preferred_segments
        alive.sort(key=lambda segment: wanted.index(segment.name) if segment.name in wanted else len(wanted))
        places: list[tuple[_Segment, int]] = []
        for segment in alive:
            if len(places) < config.replica_num and (offset := segment.space.allocate(num_bytes)) is not None:
                places.append((segment, offset))
        return places

    def _replicas(self, found: _Object) -> tuple[Replica, ...]:
        return tuple(
            Replica(segment.name, segment.path, segment.space.capacity, offset, found.num_bytes, segment.alive)
            for segment, offset in found.places
        )

    def _drop(self, key: str) -> None:
        found = self._objects.pop(key)
        for segment, offset in found.places:
            segment.space.free(offset, found.num_bytes)

    def _touch(self, key: str, found: _Object, last_use: float) -> None:
        """Queue for eviction. Old entries of the key are skipped when they come up."""
        found.last_use = last_use
        heapq.heappush(self._queue, (last_use, next(self._sequence), key))
        if len(self._queue) > 4 * len(self._objects) + 1024:
            self._queue = [
                (o.last_use, next(self._sequence), k)
                for k, o in sorted(self._objects.items(), key=lambda item: item[1].last_use)
                if o.complete
            ]

    def _tick(self) -> None:
        """What the master's threads do by themselves: release abandoned space, evict every 10 ms when there is need."""
        now = self.clock.now()
        while self._abandoned and self._abandoned[0][0] <= now:
            _, dead = self._abandoned.pop(0)
            for segment, offset in dead.places:
                segment.space.free(offset, dead.num_bytes)
        if now - self._last_eviction < EVICTION_PERIOD_S or not self.capacity_bytes:
            return
        self._last_eviction = now
        ratio = self.used_bytes / self.capacity_bytes
        if ratio > self.options.eviction_high_watermark_ratio or self._space_wanted:
            self._space_wanted = False
            self._evict(ratio)

    def _evict(self, ratio: float) -> None:
        evictable = sum(found.complete and not found.hard_pin for found in self._objects.values())
        share = max(
            self.options.eviction_ratio,
            ratio - self.options.eviction_high_watermark_ratio + self.options.eviction_ratio,
        )
        wanted = max(1, math.ceil(evictable * share))
        # Soft-pinned objects go only when nothing else is left.
        for soft in (False, True):
            kept: list[tuple[float, int, str]] = []
            while wanted and self._queue:
                entry = heapq.heappop(self._queue)
                found = self._objects.get(entry[2])
                if found is None or not found.complete or found.last_use != entry[0]:
                    continue
                pinned = found.soft_pin_end > self.clock.now()
                if found.hard_pin or found.lease_end > self.clock.now() or (pinned and not soft):
                    kept.append(entry)
                    continue
                self._drop(entry[2])
                self.evicted += 1
                wanted -= 1
            for entry in kept:
                heapq.heappush(self._queue, entry)
