"""Blocks of a named model saved to the real store and loaded back, timed and compared byte for byte."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvpool_connector.cli.output import CommandError
from kvpool_connector.cli.shapes import NamedCache
from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.keys import Key
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Store
from kvpool_connector.host import HostDevice
from kvpool_connector.staging import Staging
from kvpool_connector.transfer import DirectTransfer, PackedTransfer, Transfer, Unheld

NAMESPACE = "kvpool-selftest"
STAGING_CHUNKS = 4
LIMIT_S = 60.0


@dataclass
class Trip:
    """What came of one way of moving: seconds by phase, statuses, blocks whose bytes differ."""

    way: str
    num_blocks: int
    num_bytes: int
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong_blocks: list[int] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Everything was stored, loaded and equal."""
        return not self.failures and not self.wrong_blocks


@contextmanager
def own_keys(store: Store, count: int) -> Iterator[list[str]]:
    """Keys that nobody else has; their objects are removed at the end."""
    fingerprint = os.urandom(16).hex()
    keys = [str(Key(NAMESPACE, 0, fingerprint, i.to_bytes(8, "big"))) for i in range(count)]
    try:
        yield keys
    finally:
        store.remove(keys, force=True)


@contextmanager
def registered(store: Store, address: int, num_bytes: int) -> Iterator[None]:
    """Memory known to the transport. Raises `CommandError` where it refuses."""
    status = store.register(address, num_bytes)
    if not status.ok:
        raise CommandError(f"the store did not register {num_bytes} bytes of this process: {status.value}")
    try:
        yield
    finally:
        store.unregister(address)


def round_trip(store: Store, cache: NamedCache, way: str, repeats: int = 1) -> Trip:
    """Save all blocks, spoil the cache, load them. `way` is `packed` or `direct`."""
    ids = list(range(cache.num_blocks))
    trip = Trip(way, len(ids), len(ids) * cache.layout.object_bytes)
    with registered(store, cache.address, cache.num_bytes), _transfer(store, cache, way) as transfer:
        for repeat in range(repeats):
            cache.fill(repeat)
            expected = [cache.block(block_id) for block_id in ids]
            with own_keys(store, len(ids)) as keys:
                _timed(trip, "save", transfer.save, keys, ids, trip.save_s)
                cache.poison()
                loaded = _timed(trip, "load", transfer.load, keys, ids, trip.load_s)
            # What did not load is a failure, and holds whatever it held.
            trip.wrong_blocks += [i for i in loaded if not np.array_equal(cache.block(i), expected[i])]
    return trip


@contextmanager
def _transfer(store: Store, cache: NamedCache, way: str) -> Iterator[Transfer]:
    if way == "direct":
        yield DirectTransfer(store, cache.layout, PoolSettings().max_buffers_per_call)
        return
    device = HostDevice()
    size = STAGING_CHUNKS * max(16 << 20, cache.layout.object_bytes)
    staging = Staging(store, device, size, cache.layout.object_bytes)
    try:
        yield PackedTransfer(store, cache.layout, device.copier(cache.layout, {}, staging.buffer), staging, LIMIT_S)
    finally:
        store.unregister(staging.buffer.address)


def _timed(
    trip: Trip, phase: str, move: object, keys: Sequence[str], ids: Sequence[int], times: list[float]
) -> list[int]:
    """The blocks that were moved."""
    assert callable(move)
    start = time.perf_counter()
    statuses: list[Status] = move(keys, ids, Unheld())
    times.append(time.perf_counter() - start)
    trip.failures += [f"{phase} of block {i}: {s.value}" for i, s in zip(ids, statuses, strict=True) if not s.ok]
    return [i for i, status in zip(ids, statuses, strict=True) if status.ok]
