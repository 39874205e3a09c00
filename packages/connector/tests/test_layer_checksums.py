"""Layer by layer with checksums and an audit: the objects of whole-request transfer, and no broken layer is used."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Sequence

import pytest
from session_stores import SessionDictStore
from test_layerwise import CONTENTS, LAYERS, RANGE_BYTES, LayerRig, layer_rig, until
from test_worker import Rig, rig

from kvpool_connector import integrity
from kvpool_connector.contract.status import Status
from kvpool_connector.metadata import StepMetadata

PAGES = (16 * 32 * 2, 16 * 8 * 2, 16 * 16)
OBJECT_BYTES = 3 * sum(PAGES)
SUMS_BYTES = 3 * len(PAGES) * 8
GROUPED = [1, 2, None]


def objects(one: Rig) -> dict[str, bytes]:
    return {key: value for key, value in one.store.objects.items() if not key.endswith("descriptor")}


def whole_objects(**settings: object) -> dict[str, bytes]:
    """What whole-request transfer makes of `CONTENTS`."""
    with rig(**settings) as one:
        for block_id, content in CONTENTS.items():
            one.fill(block_id, content)
        one.save(CONTENTS)
        one.drain()
        return objects(one)


def flip(store: SessionDictStore, key: str, bit: int) -> None:
    value = bytearray(store.objects[key])
    value[bit // 8] ^= 1 << bit % 8
    store.objects[key] = bytes(value)


@pytest.mark.parametrize("mode", ["on", "sampled"])
@pytest.mark.parametrize("grouped", GROUPED)
def test_objects_with_checksums_are_those_of_whole_transfer(grouped: int | None, mode: str) -> None:
    with layer_rig(integrity=mode, layerwise_layers_per_transfer=grouped) as layers:
        layers.save_all(CONTENTS)
        assert layers.ended()
        assert layers.stored() == whole_objects(integrity=mode)
        assert {len(value) for value in layers.stored().values()} == {OBJECT_BYTES + SUMS_BYTES}
        assert layers.counts()["save_bytes"] == 3 * (OBJECT_BYTES + SUMS_BYTES)
        assert not layers.load_all({7: 15, 3: 11, 0: 12})
        for block_id, content in {7: 15, 3: 11, 0: 12}.items():
            assert layers.read(block_id) == layers.expected(content)
        assert layers.counts()["load_bytes"] == 3 * (OBJECT_BYTES + SUMS_BYTES)


def test_whole_transfer_reads_what_layers_saved_and_the_other_way_round() -> None:
    store = SessionDictStore()
    with layer_rig(store, integrity="on") as layers:
        layers.save_all(CONTENTS)
        assert layers.ended()
    with rig(store, integrity="on") as whole:
        whole.load({4: 15, 8: 12})
        assert whole.worker.take_failed_blocks() == set()
        assert [whole.read(4), whole.read(8)] == [whole.expected(15), whole.expected(12)]
        whole.fill(9, 19)
        whole.save({9: 19})
        whole.drain()
    with layer_rig(store, integrity="on") as layers:
        assert not layers.load_all({7: 19, 3: 11})
        assert [layers.read(7), layers.read(3)] == [layers.expected(19), layers.expected(11)]


@pytest.mark.parametrize("grouped", GROUPED)
def test_a_flipped_bit_in_any_component_fails_its_block_alone(grouped: int | None) -> None:
    dice = random.Random(6)
    with layer_rig(integrity="on", layerwise_layers_per_transfer=grouped) as one:
        bits, at = [8 * OBJECT_BYTES + dice.randrange(8 * SUMS_BYTES)], 0
        for size in PAGES * 3:
            bits.append(8 * at + dice.randrange(8 * size))
            at += size
        for bit in bits:
            one.save_all(CONTENTS)
            assert one.ended()
            flip(one.store, one.key(15), bit)
            before = one.read(3)
            assert one.load_all({7: 12, 3: 15, 0: 11}) == {3}, bit
            assert [one.read(7), one.read(0)] == [one.expected(12), one.expected(11)]
            assert one.key(15) not in one.stored(), "a broken object stays and is hit again"
            # The layers in front of the broken one were right, and what is broken never reaches the cache.
            after, right = one.read(3), one.expected(15)
            assert all(now in (was, good) for now, was, good in zip(after, before, right, strict=True))
        assert one.counts()["load_blocks_corrupt"] == len(bits)


def test_a_broken_layer_has_failed_before_the_layer_is_used() -> None:
    with layer_rig(integrity="on") as one:
        one.save_all(CONTENTS)
        assert one.ended()
        flip(one.store, one.key(15), 8 * RANGE_BYTES)
        one.fill(3, 99)
        step = one.begin_load({3: 15})
        one.worker.wait_layer(LAYERS[0])
        one.worker.wait_layer(LAYERS[1])
        load = one.worker._layer_load
        assert load is not None
        assert [block.status for block in load.objects] == [Status.CORRUPT]
        assert one.read(3)[RANGE_BYTES : 2 * RANGE_BYTES] == one.expected(99)[RANGE_BYTES : 2 * RANGE_BYTES]
        one.worker.wait_layer(LAYERS[2])
        one.worker.end_step(step)
        assert one.worker.take_failed_blocks() == {3}


def test_comparing_nothing_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity.Integrity, "broken", lambda self, *_: [])
    with pytest.raises(AssertionError):
        test_a_flipped_bit_in_any_component_fails_its_block_alone(1)


def test_one_in_sixteen_is_compared_and_the_checksums_of_no_other_are_read() -> None:
    with layer_rig(integrity="sampled") as one:
        found = 0
        for turn in range(4):
            contents = {block_id: 20 + 8 * turn + block_id for block_id in range(8)}
            one.save_all(contents)
            assert one.ended()
            for content in contents.values():
                flip(one.store, one.key(content), 5)
            one.store.asked.clear()
            found += len(one.load_all(contents))
            assert one.store.asked.count(("get", OBJECT_BYTES)) == (turn % 2 == 0)
        assert found == 2


@pytest.mark.parametrize("fault", [Status.CORRUPT, Status.MISS])
def test_checksums_that_were_not_written_revoke_their_object(fault: Status) -> None:
    with layer_rig(integrity="on") as one:
        one.store.range_faults[one.key(15), OBJECT_BYTES] = fault
        one.save_all(CONTENTS)
        assert one.ended()
        assert set(one.stored()) == {one.key(11), one.key(12)}
        assert one.store.revoked == [one.key(15)]
        assert one.counts()[f"save_blocks_{fault.value}"] == 1


@pytest.mark.parametrize("fault", [Status.CORRUPT, Status.MISS])
def test_checksums_that_cannot_be_read_fail_their_block(fault: Status) -> None:
    with layer_rig(integrity="on") as one:
        one.save_all(CONTENTS)
        assert one.ended()
        one.store.range_faults[one.key(15), OBJECT_BYTES] = fault
        assert one.load_all({7: 12, 3: 15}) == {3}
        assert one.read(7) == one.expected(12)
        assert len(one.stored()) == 3, "what could not be read is not called broken"


def test_no_checksums_are_written_to_a_session_past_its_limit() -> None:
    with layer_rig(integrity="on", layerwise_session_limit_s=20) as one:
        step = one.begin_save({1: 11})
        for layer in LAYERS:
            one.worker.save_layer(layer)
        until(lambda: len(one.store.asked) == 3)
        one.clock.time = 20
        one.worker.end_step(step)
        assert one.ended()
        assert ("put", OBJECT_BYTES) not in one.store.asked
        assert one.counts()["save_blocks_dropped_stale"] == 1


class Changing(SessionDictStore):
    """Keeps of what is ended only what `fault` makes of it."""

    def __init__(self, faults: dict[str, int | None]) -> None:
        super().__init__()
        self.faults = faults

    def end_put(self, keys: Sequence[str]) -> list[Status]:
        statuses = super().end_put(keys)
        for key in set(keys) & set(self.faults):
            bit = self.faults[key]
            if bit is None:
                del self.objects[key]
            else:
                flip(self, key, bit)
        return statuses


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("grouped", GROUPED)
def test_a_store_that_keeps_its_word_is_not_accused(
    grouped: int | None, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with layer_rig(integrity=mode, audit_every=1, layerwise_layers_per_transfer=grouped) as one:
        one.save_all(CONTENTS)
        assert one.ended()
        counts = one.counts()
        assert {name: n for name, n in counts.items() if "_blocks_" in name} == {
            "save_blocks_stored": 3,
            "audit_blocks_ok": 3,
        }
        assert one.stored() == whole_objects(integrity=mode)
        assert not caplog.records


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("at", [0, 8 * RANGE_BYTES - 1, 8 * RANGE_BYTES, 8 * OBJECT_BYTES - 1])
def test_an_audit_finds_other_bytes_and_removes_them(mode: str, at: int, caplog: pytest.LogCaptureFixture) -> None:
    store = Changing({})
    with layer_rig(store, integrity=mode, audit_every=1) as one:
        store.faults = {one.key(15): at}
        one.save_all(CONTENTS)
        assert one.ended()
        assert set(one.stored()) == {one.key(11), one.key(12)}
        assert one.counts()["audit_blocks_wrong"] == one.counts()["save_blocks_corrupt"] == 1
        (line,) = [record.getMessage() for record in caplog.records if "audit_wrong" in record.message]
        assert f"key={one.key(15)} components={at // (8 * RANGE_BYTES)}." in line


@pytest.mark.parametrize("mode", ["off", "on"])
def test_an_audit_finds_what_was_lost(mode: str) -> None:
    store = Changing({})
    with layer_rig(store, integrity=mode, audit_every=1) as one:
        store.faults = {one.key(15): None}
        one.save_all(CONTENTS)
        assert one.ended()
        assert one.counts()["audit_blocks_lost"] == one.counts()["save_blocks_miss"] == 1
        assert one.counts()["save_blocks_stored"] == 2


def test_an_audit_is_not_made_in_the_steps_thread() -> None:
    """Nor is anything else asked of the store there."""
    threads: set[int] = set()

    class Noting(SessionDictStore):
        def end_put(self, keys: Sequence[str]) -> list[Status]:
            threads.add(threading.get_ident())
            return super().end_put(keys)

        def get(self, *arguments: object) -> list[Status]:
            threads.add(threading.get_ident())
            return super().get(*arguments)  # type: ignore[arg-type]

    with layer_rig(Noting(), audit_every=1) as one:
        step = one.begin_save({1: 11})
        for layer in LAYERS:
            one.worker.save_layer(layer)
        until(lambda: len(one.store.asked) == 3)
        save = one.worker._layer_save
        until(lambda: save is not None and save.tasks == 1)
        one.worker.end_step(step)
        assert one.ended()
        assert one.counts()["audit_blocks_ok"] == 1
        assert threads
        assert threading.get_ident() not in threads


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_checksums_beside_a_small_staging_area(per_chunk: int) -> None:
    """A chunk that holds one block's range, or two: the checksums behind it stay inside."""
    size = 3 * per_chunk * (OBJECT_BYTES + SUMS_BYTES + SUMS_BYTES)
    with layer_rig(integrity="on", audit_every=1, staging_bytes=size, layerwise_layers_per_transfer=None) as one:
        staging = one.worker._staging
        assert staging is not None
        guard = ctypes.string_at(staging.buffer.address + staging.buffer.num_bytes, 64)
        one.save_all(CONTENTS)
        assert one.ended()
        assert one.stored() == whole_objects(integrity="on")
        assert not one.load_all({7: 15, 3: 11, 0: 12})
        assert [one.read(b) for b in (7, 3, 0)] == [one.expected(c) for c in (15, 11, 12)]
        assert ctypes.string_at(staging.buffer.address + staging.buffer.num_bytes, 64) == guard


def test_closing_in_mid_step_leaves_nothing_open() -> None:
    with layer_rig(integrity="on") as one:
        one.save_all({1: 11})
        assert one.ended()
        one.begin_save({2: 12})
        one.worker.save_layer(LAYERS[0])
        one.worker.start_loads(StepMetadata())
        one.worker.close()
        assert set(one.stored()) == {one.key(11)}
        assert not one.store.open_puts


def test_shards_with_and_without_checksums_are_apart() -> None:
    store = SessionDictStore()
    keys = set()
    for mode in ("off", "on"):
        with layer_rig(store, integrity=mode) as one:
            keys.add(one.key(11))
    assert len(keys) == 2


def test_the_rigs_numbers_are_right() -> None:
    assert sum(PAGES) == RANGE_BYTES
    with layer_rig() as one:
        assert isinstance(one, LayerRig)
        assert len(one.expected(11)) == OBJECT_BYTES
