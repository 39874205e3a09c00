"""Lookups of long requests, end to end in the scheduler, against one raw call of the store with the same keys."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

from bench.measure import Row, pairs, spread
from bench.planning import BLOCK_SIZE, REQUEST_BLOCKS, hashes_of, shard_map
from kvpool_connector.contract.clock import MonotonicClock
from kvpool_connector.contract.topology import Topology
from kvpool_connector.lookup import StoreLookup
from kvpool_connector.mooncake import MooncakeStore
from kvpool_connector.outage import Outage
from kvpool_connector.scheduler import PoolScheduler
from kvpool_connector.tracker import GroupRule, RequestView
from tests.targets.borrowed import Borrowed
from tests.targets.real_mooncake import make_store, real_master

TOPOLOGIES = {
    "TP 8, MLA": Topology(tp_size=8, num_kv_heads=1),
    "TP 8, GQA with 8 heads": Topology(tp_size=8, num_kv_heads=8),
    "PP 2": Topology(pp_size=2, num_kv_heads=1),
}
NUM_TOKENS = REQUEST_BLOCKS * BLOCK_SIZE + 1
"""One token is left to compute, so that every block is asked for."""


def fill(store: MooncakeStore, keys: Sequence[str]) -> None:
    """An object of one byte under every key."""
    byte = ctypes.create_string_buffer(1)
    address = ctypes.addressof(byte)
    for start in range(0, len(keys), 512):
        part = keys[start : start + 512]
        statuses = store.put(part, [[address]] * len(part), [[1]] * len(part))
        assert all(status.ok for status in statuses), f"the pool was not filled: {statuses}"


def lookup(store: MooncakeStore, what: str, topology: Topology, repeats: int) -> Row:
    """A request all of whose blocks are in the pool."""
    shards, hashes = shard_map(topology), hashes_of(REQUEST_BLOCKS)
    keys = shards.keys(0, hashes)
    fill(store, keys)
    asked = StoreLookup(Borrowed(store), Outage(MonotonicClock(), 5.0), 5.0)
    scheduler = PoolScheduler([GroupRule(BLOCK_SIZE)], BLOCK_SIZE, asked)
    scheduler.set_shards(shards)
    numbers = itertools.count()

    def end_to_end() -> None:
        view = RequestView(str(next(numbers)), NUM_TOKENS, NUM_TOKENS, hashes)
        found = scheduler.num_matched_tokens(view, 0)
        assert found == (NUM_TOKENS - 1, False), f"not all was found: {found}"
        scheduler.finished(view.request_id, NUM_TOKENS, completed=False)

    client = store._open()
    taken = pairs(end_to_end, lambda: client.batch_is_exist(keys), repeats)
    scheduler.close()
    return Row(
        "Lookup",
        f"lookup of {REQUEST_BLOCKS:,} blocks, {what} ({len(keys):,} keys): time",
        "one raw `batch_is_exist` of the same keys",
        **spread(ours / raw for ours, raw in taken),
        at_most=1.3,
    )


def rows(short: bool) -> list[Row]:
    """This part of the table."""
    with real_master(64 << 20, lease_s=10) as master:
        store = make_store(master.address, 0)
        try:
            return [lookup(store, what, topology, 15 if short else 101) for what, topology in TOPOLOGIES.items()]
        finally:
            store.close()
