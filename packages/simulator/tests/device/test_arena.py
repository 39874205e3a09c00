"""Bounds, alignment, guards, poison and snapshots of the arena."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_simulator.device.arena import GUARD, POISON, START_ALIGNMENT, Arena
from kvpool_simulator.device.intervals import complement, merge

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12)


def split(ranges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(ranges, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 0] + table[:, 1]


@given(RANGES, st.integers(0, 40), st.integers(0, 40))
def test_intervals_against_sets(ranges: list[tuple[int, int]], low: int, span: int) -> None:
    inside = {i for start, size in ranges for i in range(start, start + size)}
    starts, ends = merge(*split(ranges))
    assert {i for s, e in zip(starts, ends, strict=True) for i in range(s, e)} == inside
    assert (starts[1:] > ends[:-1]).all()
    starts, ends = complement(*split(ranges), low, low + span)
    assert {i for s, e in zip(starts, ends, strict=True) for i in range(s, e)} == set(range(low, low + span)) - inside
    assert (ends > starts).all()


def small_arena() -> Arena:
    """Pages of 100 bytes every 160 in one allocation of 1,000."""
    arena = Arena.anonymous(Arena.bytes_for([(1_000, False), (64, True)]))
    storage = arena.allocate(1_000, aligned=False)
    arena.claim("layer k", storage.address + np.arange(6) * 160, 100, kernel_blocks=2)
    other = arena.allocate(64)
    arena.claim("other v", np.array([other.address]), 64)
    arena.poison()
    return arena


def test_alignment() -> None:
    arena = Arena.anonymous(Arena.bytes_for([(10, True), (START_ALIGNMENT + 1, True), (10, False)]))
    first, second, third = arena.allocate(10), arena.allocate(START_ALIGNMENT + 1), arena.allocate(10, aligned=False)
    for storage in (first, second):
        assert storage.address % START_ALIGNMENT == 0
        assert storage.raw.data_ptr() == storage.address
        whole = storage.raw.untyped_storage()
        assert whole.nbytes() == storage.num_bytes + START_ALIGNMENT
        assert whole.data_ptr() % START_ALIGNMENT != 0
        assert whole.data_ptr() < storage.address
    assert third.address % START_ALIGNMENT != 0
    assert third.raw.untyped_storage().nbytes() == 10


def test_every_byte_outside_pages_is_a_guard() -> None:
    arena = small_arena()
    pages = {offset for s, e in zip(*arena.pages(), strict=True) for offset in range(s, e)}
    assert len(pages) == 6 * 100 + 64
    poisoned = np.flatnonzero(arena.memory == POISON)
    assert set(poisoned.tolist()) == pages
    assert (np.delete(arena.memory, poisoned) == GUARD).all()
    assert arena.check_guards() == []


@settings(max_examples=30, deadline=None)
@given(gap=st.integers(0, 7), where=st.floats(0, 1), flip=st.integers(1, 255))
def test_one_changed_guard_byte_is_found(gap: int, where: float, flip: int) -> None:
    arena = small_arena()
    starts, ends = complement(*arena.pages(), 0, arena.num_bytes)
    assert len(starts) == 8
    offset = int(starts[gap] + where * (ends[gap] - starts[gap] - 1))
    arena.memory[offset] ^= flip
    (damage,) = arena.check_guards()
    assert (damage.offset, damage.size, damage.address) == (offset, 1, arena.address + offset)


def test_damage_names_the_nearest_page() -> None:
    arena = small_arena()
    page = int(arena.pages()[0][2])
    arena.memory[page + 100 : page + 103] = 1
    arena.memory[page - 1] = 2
    before, after = arena.check_guards()
    assert before.nearest == "1 bytes before layer k, block 1"
    assert after.nearest == "0 bytes after layer k, block 1"
    assert str(after).startswith(f"3 bytes at offset {page + 100} are now 01 01 01: 0 bytes after layer k")
    assert arena.nearest(arena.address + page + 7) == "byte 7 of layer k, block 1"
    assert len(arena.check_guards(limit=1)) == 1


def test_poison_leaves_guards_alone() -> None:
    arena = small_arena()
    arena.poison(0x11)
    assert arena.check_guards() == []
    assert int((arena.memory == 0x11).sum()) == 664


def test_snapshot_sees_what_changed_outside_the_ranges() -> None:
    arena = small_arena()
    snapshot = arena.snapshot()
    start = arena.address + int(arena.pages()[0][1])
    arena.view(start, 100)[:] = 1
    assert snapshot.changed_outside([(start, 100)]) == []
    assert snapshot.changed_outside([(start, 50), (start + 40, 60)]) == []
    (damage,) = snapshot.changed_outside([(start, 90)])
    assert (damage.address, damage.size, damage.found) == (start + 90, 10, b"\1" * 8)
    (damage,) = snapshot.changed_outside([])
    assert damage.size == 100


def test_shared_memory_can_hold_an_arena() -> None:
    memory = SharedMemory(create=True, size=Arena.bytes_for([(64, True)]) + START_ALIGNMENT)
    try:
        assert memory.buf is not None
        arena = Arena(memory.buf)
        storage = arena.allocate(64)
        storage.raw[3] = 77
        offset = storage.address - arena.address + 3
        peer = SharedMemory(memory.name)
        assert peer.buf is not None
        assert peer.buf[offset] == 77
        peer.close()
        del storage, arena
    finally:
        memory.close()
        memory.unlink()


def test_misuse_is_refused_in_words() -> None:
    arena = Arena.anonymous(Arena.bytes_for([(100, False)]))
    with pytest.raises(ValueError, match="at least 1 byte"):
        arena.allocate(0)
    with pytest.raises(ValueError, match="the arena is full"):
        arena.allocate(3 * START_ALIGNMENT, aligned=False)
    with pytest.raises(ValueError, match="not inside the arena"):
        arena.view(arena.address + arena.num_bytes - 1, 2)
    with pytest.raises(ValueError, match="inside the arena"):
        arena.claim("x", np.array([arena.address - 1]), 1)
    with pytest.raises(ValueError, match="writable"):
        Arena(memoryview(bytes(10)))
