"""What a store's sessions do not guard against, on both stores: half objects, lost keys, leases that end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpool_connector.contract.status import Status
from kvpool_connector.metadata import StepMetadata
from tests.twin.layered import MIB, NUM_BLOCKS, LayeredRank
from tests.twin.world import DISCARD_S, LEASE_S, SEGMENT_BYTES, World, get, put


@pytest.fixture
def other(fresh_world: World) -> Any:
    """Another client, in a world with memory."""
    fresh_world.client(SEGMENT_BYTES)
    return fresh_world.client()


def half_fails(rank: LayeredRank, key: str, layer: int) -> None:
    """One range of one block is not written, and the store says so."""
    put_ranges = rank.store.put_ranges

    def failing(keys: Any, addresses: Any, sizes: Any, offsets: Any) -> list[Status]:
        lost = [i for i, one in enumerate(keys) if one == key and offsets[i] == [layer * MIB]]
        kept = [i for i in range(len(keys)) if i not in lost]
        rows = ([row[i] for i in kept] for row in (keys, addresses, sizes, offsets))
        written = iter(put_ranges(*rows))
        return [Status.CORRUPT if i in lost else next(written) for i in range(len(keys))]

    rank.store.put_ranges = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("layer", range(2))
def test_a_half_object_is_revoked_and_the_others_are_whole(fresh_world: World, other: Any, layer: int) -> None:
    rank = LayeredRank(fresh_world, 2)
    half = rank.keys[3]
    half_fails(rank, half, layer)
    rank.fill(1)
    rank.save()
    assert rank.counts() == {"save_blocks_stored": NUM_BLOCKS - 1, "save_blocks_corrupt": 1}
    assert [other.is_exist(key) for key in rank.keys] == [int(key != half) for key in rank.keys]
    # Nothing is left that is in the way of a later save.
    del rank.store.put_ranges
    rank.save()
    assert rank.counts()["save_blocks_stored"] == NUM_BLOCKS
    rank.worker.close()
    read_back(fresh_world, 1)


def test_a_session_that_ends_unwritten_shows_garbage(fresh_world: World, other: Any) -> None:
    # Were half objects ended, which the store allows, they would be there.
    rank = LayeredRank(fresh_world, 2)
    key = rank.keys[0]
    assert rank.store.begin_put([key], [2 * MIB]) == [Status.OK]
    assert rank.store.end_put([key]) == [Status.OK]
    assert other.is_exist(key) == 1
    rank.worker.close()


def test_a_key_that_another_takes_is_not_stored_and_not_touched(fresh_world: World, other: Any) -> None:
    rank = LayeredRank(fresh_world, 2, layerwise_session_limit_s=600)
    step = rank.begin_save()
    rank.worker.save_layer(rank.layers[0])
    rank.await_ranges(left=1)
    fresh_world.advance(DISCARD_S + 1.2)
    for i, key in enumerate(rank.keys):
        assert put(other, key, bytes([i]) * 64) == 0
    rank.worker.save_layer(rank.layers[1])
    rank.end_save(step)
    assert rank.counts() == {"save_blocks_dropped_lost": NUM_BLOCKS}
    for i, key in enumerate(rank.keys):
        assert get(other, key, 64) == (64, bytes([i]) * 64)
    # The client cannot let go of such a session as long as the other's object is there, and can once it is gone.
    rank.save()
    assert rank.counts() == {"save_blocks_dropped_lost": 2 * NUM_BLOCKS}
    fresh_world.advance(LEASE_S + 0.5)
    assert [other.remove(key) for key in rank.keys] == [0] * NUM_BLOCKS
    rank.fill(1)
    rank.save()
    assert rank.counts()["save_blocks_stored"] == NUM_BLOCKS
    assert not rank.worker._layer_saver._stuck
    rank.worker.close()
    read_back(fresh_world, 1)


def test_a_session_past_the_discard_time_is_stored_or_not_as_counted(fresh_world: World, other: Any) -> None:
    rank = LayeredRank(fresh_world, 2, layerwise_session_limit_s=600)
    rank.fill(1)
    step = rank.begin_save()
    rank.worker.save_layer(rank.layers[0])
    rank.await_ranges(left=1)
    fresh_world.advance(DISCARD_S + 1.2)
    rank.worker.save_layer(rank.layers[1])
    rank.end_save(step)
    there = sum(other.is_exist(key) for key in rank.keys)
    counts = rank.counts()
    assert counts.get("save_blocks_stored", 0) == there
    assert counts.get("save_blocks_dropped_lost", 0) == NUM_BLOCKS - there
    rank.worker.close()


def test_a_step_that_breaks_off_leaves_nothing_in_the_store(fresh_world: World, other: Any) -> None:
    rank = LayeredRank(fresh_world, 2)
    rank.begin_save()
    rank.worker.save_layer(rank.layers[0])
    rank.await_ranges(left=1)
    rank.worker.begin_step(StepMetadata())
    assert rank.worker.drain(60)
    assert not any(other.is_exist(key) for key in rank.keys)
    rank.fill(1)
    rank.save()
    rank.worker.close()
    read_back(fresh_world, 1)


@pytest.mark.parametrize("by_layers", [False, True])
def test_c8_what_a_dead_client_began_is_a_miss_until_another_stores_it(
    fresh_world: World, other: Any, by_layers: bool
) -> None:
    """The store answers 0 to whoever puts a key that another has begun: nobody takes that for stored."""
    rank = LayeredRank(fresh_world, 2, use_layerwise=by_layers)
    began = time.monotonic()
    assert other.batch_put_session_start(rank.keys, [2 * MIB] * NUM_BLOCKS) == [0] * NUM_BLOCKS
    rank.fill(1)
    for _ in range(2):
        rank.save()
        found = rank.store.exist(rank.keys)
        if time.monotonic() - began >= DISCARD_S:
            # So slow a machine that real Mooncake may have given the keys up.
            break
        assert found == [Status.MISS] * NUM_BLOCKS
        step = rank.begin_load()
        for layer in rank.layers:
            rank.worker.wait_layer(layer)
        rank.worker.end_step(step)
        assert rank.worker.take_failed_blocks() == set(range(NUM_BLOCKS))
    fresh_world.advance(DISCARD_S + 1.2)
    rank.fill(1)
    rank.save()
    assert rank.store.exist(rank.keys) == [Status.OK] * NUM_BLOCKS
    rank.worker.close()
    read_back(fresh_world, 1)


def read_back(world: World, value: float) -> None:
    """A fresh rank loads every block, layer by layer."""
    rank = LayeredRank(world, 2)
    step = rank.begin_load()
    for layer in rank.layers:
        rank.worker.wait_layer(layer)
    rank.worker.end_step(step)
    assert rank.worker.take_failed_blocks() == set()
    assert rank.values() == {block_id: [value + block_id, value + 16 + block_id] for block_id in range(NUM_BLOCKS)}
    rank.worker.close()


@pytest.mark.parametrize(("renew_s", "failed"), [(LEASE_S / 2, set()), (600.0, set(range(NUM_BLOCKS)))])
def test_a_slow_step_loads_all_where_leases_are_renewed(
    fresh_world: World, other: Any, renew_s: float, failed: set[int]
) -> None:
    saving = LayeredRank(fresh_world, 3)
    saving.fill(1)
    saving.save()
    saving.worker.close()
    loading = LayeredRank(fresh_world, 3, layerwise_renew_s=renew_s, layerwise_prefetch_layers=1)
    step = loading.begin_load()
    loading.worker.wait_layer(loading.layers[0])
    load = loading.worker._layer_load
    assert load is not None
    assert load.wait([(0, 1)], 30)
    fresh_world.advance(LEASE_S + 0.5)
    loading.worker.wait_layer(loading.layers[1])
    loading.worker.wait_layer(loading.layers[2])
    loading.worker.end_step(step)
    assert loading.worker.take_failed_blocks() == failed
    counts = loading.worker.counters.totals()
    assert counts.get("load_blocks_lease_expired", 0) == len(failed)
    if not failed:
        assert loading.values() == {i: [1 + i, 17 + i, 33 + i] for i in range(NUM_BLOCKS)}
    loading.worker.close()


def wrong_blocks_after_removal(world: World, **settings: object) -> tuple[set[int], set[int]]:
    """A step whose objects are removed, and their memory given to others, in the middle of its load.

    The blocks that were reported as not loaded, and those whose bytes are wrong.
    """
    client = world.client()
    saving = LayeredRank(world, 3, **settings)
    saving.fill(1)
    saving.save()
    keys = saving.keys
    saving.worker.close()
    loading = LayeredRank(world, 3, layerwise_prefetch_layers=1, **settings)
    step = loading.begin_load()
    loading.worker.wait_layer(loading.layers[0])
    load = loading.worker._layer_load
    assert load is not None
    assert load.wait([(0, 1)], 30)
    assert [client.remove(key, True) for key in keys] == [0] * NUM_BLOCKS
    value = bytes([200]) * (2 * MIB)
    # As many as the memory holds: some must lie where the removed ones lay.
    for _ in range(SEGMENT_BYTES // len(value)):
        put(client, world.key(), value)
    for layer in loading.layers[1:]:
        loading.worker.wait_layer(layer)
    loading.worker.end_step(step)
    failed = loading.worker.take_failed_blocks()
    wrong = {
        block_id
        for block_id in range(NUM_BLOCKS)
        for i, cache in enumerate(loading.caches.values())
        if not bool((cache[block_id] == 1 + 16 * i + block_id).all())
    }
    loading.worker.close()
    return failed, wrong


LONG_LEASE_MS = 120_000
"""No lease ends in the course of a test, however slow the machine is."""


def test_an_object_that_is_removed_in_the_middle_of_its_load_is_not_used(make_world: Callable[..., World]) -> None:
    """The store then gives a range another object's bytes and calls it a success; a layer's checksums do not."""
    world = make_world(default_kv_lease_ttl=LONG_LEASE_MS)
    world.client(SEGMENT_BYTES)
    failed, wrong = wrong_blocks_after_removal(world, integrity="on")
    assert wrong
    assert wrong <= failed


def test_without_checksums_it_would_be_used(make_world: Callable[..., World]) -> None:
    world = make_world(default_kv_lease_ttl=LONG_LEASE_MS)
    world.client(SEGMENT_BYTES)
    failed, wrong = wrong_blocks_after_removal(world)
    assert wrong - failed
