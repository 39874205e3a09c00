"""The segments that a master knows: who gave them, which take objects, and where an object goes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvpool_simulator.store.options import ReplicateConfig
from kvpool_simulator.store.segment import Owner, Segment

REMOUNT_S = 0.9
"""How long clients take to notice that the master is back, or that it dropped them."""


class Segments:
    """Mounted segments, by name."""

    def __init__(self, seed: int) -> None:
        self._by_name: dict[str, Segment] = {}
        self._dropped: list[Segment] = []
        """Unmounted because their owner was silent; it mounts them again if it ever goes on."""
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Segment | None:
        """The segment of that name."""
        return self._by_name.get(name)

    def add(self, segment: Segment) -> None:
        """Mount one."""
        self._by_name[segment.name] = segment

    def drop(self, segment: Segment) -> None:
        """Unmount one."""
        del self._by_name[segment.name]

    def forget(self, client: int) -> None:
        """A client has left for good."""
        self._dropped = [segment for segment in self._dropped if segment.client != client]

    def set_owner(self, client: int, state: Owner, now: float) -> None:
        """A client dies, hangs or goes on."""
        for segment in self.of(client):
            segment.owner, segment.silent_since = state, now
        if state is Owner.ALIVE:
            for segment in [one for one in self._dropped if one.client == client]:
                segment.owner = state
                segment.mount_again(now + REMOUNT_S)
                self.add(segment)
            self.forget(client)

    def of(self, client: int) -> list[Segment]:
        """Those that a client gave."""
        return [segment for segment in self if segment.client == client]

    @property
    def used_bytes(self) -> int:
        """Bytes that objects and unfinished writes asked for."""
        return sum(segment.space.used for segment in self)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.space.capacity for segment in self)

    def place(self, num_bytes: int, config: ReplicateConfig, now: float) -> list[tuple[Segment, int]]:
        """One place a replica, each on another segment; fewer when fewer segments have room."""
        candidates = [segment for segment in self if segment.mounted_at <= now]
        if len(candidates) > 1:
            self._random.shuffle(candidates)
            wanted = [config.preferred_segment] if config.preferred_segment else config.preferred_segments
            candidates.sort(key=lambda one: wanted.index(one.name) if one.name in wanted else len(wanted))
        places: list[tuple[Segment, int]] = []
        for segment in candidates:
            if len(places) == config.replica_num:
                break
            if (offset := segment.space.allocate(num_bytes)) is not None:
                places.append((segment, offset))
        return places

    def silent(self, since: float) -> list[Segment]:
        """Those whose owner has not been heard of since then; noted, should it ever go on."""
        found = [s for s in self if s.owner is not Owner.ALIVE and s.silent_since <= since]
        self._dropped += found
        return found
