"""The worker side moves exact bytes, reports exact failures, and never touches a block that is not its own."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from clocks import ManualClock
from stores import DictStore

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.errors import ConfigError
from kvpool_connector.contract.shards import RankShards
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces
from kvpool_connector.contract.topology import LayerCuts, Rank, Topology
from kvpool_connector.hashing import Hashing
from kvpool_connector.host import HostDevice
from kvpool_connector.loudness import Loudness
from kvpool_connector.metadata import GroupBlocks, LoadJob, LoadReport, SaveJob, StepMetadata
from kvpool_connector.registration import GroupSpec
from kvpool_connector.worker import PoolWorker

NUM_BLOCKS = 12
MODES = ("packed", "direct", "learnt")
PIECES = 9
"""Of a block: three layers of three components."""


class Rig:
    """One worker with a tiny three-layer latent cache."""

    def __init__(
        self,
        store: DictStore | None = None,
        topology: Topology | None = None,
        rank: Rank | None = None,
        device: HostDevice | None = None,
        hashing: Hashing | None = None,
        reports_stored: bool = False,
        **settings: object,
    ) -> None:
        self.store = store or DictStore()
        self.clock = ManualClock()
        options = {"staging_bytes": 3 << 20, "namespace": "test", **settings}
        self.worker = PoolWorker(
            PoolSettings.model_validate(options),
            self.store,
            device or HostDevice(),
            topology or Topology(1),
            rank or Rank(),
            ModelIdentity("tiny"),
            self.clock,
            hashing=hashing,
            reports_stored=reports_stored,
        )
        self.caches = {
            f"model.layers.{i}.attn": (
                torch.zeros(NUM_BLOCKS, 16, 1, 32, dtype=torch.bfloat16),
                torch.zeros(NUM_BLOCKS, 16, 1, 8, dtype=torch.bfloat16),
                torch.zeros(NUM_BLOCKS, 16, 1, 16, dtype=torch.int8),
            )
            for i in range(3)
        }
        self.worker.register(self.caches, [GroupSpec(tuple(self.caches), 16, NUM_BLOCKS, kind="latent")])

    def fill(self, block_id: int, content: int) -> None:
        generator = torch.Generator().manual_seed(content)
        for entry in self.caches.values():
            for tensor in entry:
                page = tensor[block_id].view(torch.int8)
                page.copy_(torch.randint(-128, 128, page.shape, dtype=torch.int8, generator=generator))

    def read(self, block_id: int) -> bytes:
        pages = (t[block_id].contiguous().view(torch.uint8).numpy().tobytes() for e in self.caches.values() for t in e)
        return b"".join(pages)

    def expected(self, content: int) -> bytes:
        kept = [[t[0].clone() for t in entry] for entry in self.caches.values()]
        self.fill(0, content)
        value = self.read(0)
        for entry, pages in zip(self.caches.values(), kept, strict=True):
            for tensor, page in zip(entry, pages, strict=True):
                tensor[0] = page
        return value

    def save(self, blocks: dict[int, int], **job: object) -> None:
        """Blocks of contents, saved in one step."""
        step = StepMetadata(saves=(SaveJob("r", (group(blocks),), **job),))  # type: ignore[arg-type]
        self.worker.begin_step(step)
        self.worker.end_step(step)

    def load(self, blocks: dict[int, int], between_steps: bool = False, request_id: str = "r") -> None:
        step = StepMetadata(loads=(LoadJob(request_id, (group(blocks),), between_steps=between_steps),))
        self.worker.begin_step(step)
        self.worker.start_loads(step)
        self.worker.end_step(step)

    def wait_loaded(self) -> tuple[set[str], set[str]]:
        for _ in range(10_000):
            ended, failed = self.worker.take_loaded()
            if ended:
                return ended, failed
            threading.Event().wait(0.001)
        raise AssertionError("the load never ended")

    def drain(self) -> None:
        assert self.worker._saver is not None
        assert self.worker._saver.drain(10)


def group(blocks: dict[int, int]) -> GroupBlocks:
    """Block ids with the hashes of their contents."""
    return GroupBlocks(0, tuple(blocks), tuple(hashlib.sha256(b"%d" % content).digest() for content in blocks.values()))


@contextmanager
def rig(*arguments: object, **options: object) -> Iterator[Rig]:
    """A rig, closed at the end."""
    made = Rig(*arguments, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for gate in made.store.gates.values():
            gate.set()
        made.worker.close()
        assert made.store.closed
        assert not [thread for thread in threading.enumerate() if thread is made.worker._saver]


@pytest.mark.parametrize("loading", MODES)
@pytest.mark.parametrize("saving", MODES)
def test_what_one_way_saves_the_other_loads(saving: str, loading: str) -> None:
    store = DictStore()
    contents = {1: 11, 5: 15, 2: 12, 9: 19}
    with rig(store, transfer=saving) as source:
        for block_id, content in contents.items():
            source.fill(block_id, content)
        source.save(contents)
        source.drain()
        assert source.worker.counters.totals()["save_blocks_stored"] == 4
    with rig(store, transfer=loading) as target:
        before = {block_id: target.read(block_id) for block_id in range(NUM_BLOCKS)}
        moved = {7: 15, 1: 19, 3: 11, 0: 12}
        target.load(moved)
        assert target.worker.take_failed_blocks() == set()
        assert target.worker.take_report() == LoadReport(loaded=frozenset({"r"}))
        for block_id in range(NUM_BLOCKS):
            wanted = target.expected(moved[block_id]) if block_id in moved else before[block_id]
            assert target.read(block_id) == wanted, block_id


def raising(keys: Sequence[str]) -> list[Status]:
    raise RuntimeError("broken store")


FAULTS: dict[str, Callable[[Sequence[str]], object]] = {
    "missing": lambda keys: [Status.MISS] * len(keys),
    "negative": lambda keys: [Status.UNAVAILABLE] * len(keys),
    "short": lambda keys: [Status.CORRUPT] * len(keys),
    "exception": raising,
    "none": lambda keys: None,
    "too few": lambda keys: [Status.OK] * (len(keys) - 1),
    "too many": lambda keys: [Status.OK] * (len(keys) + 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("between_steps", [False, True])
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_a9_exactly_the_affected_blocks_are_reported_once(
    fault: str, position: int, between_steps: bool, mode: str
) -> None:
    with rig(transfer=mode, max_buffers_per_call=1900) as worker:
        contents = {block_id: 100 + block_id for block_id in range(5)}
        for block_id, content in contents.items():
            worker.fill(block_id, content)
        worker.save(contents)
        worker.drain()
        bad_key = worker.worker._part.shards[0].key(group({0: 100 + position}).block_hashes[0])  # type: ignore[union-attr]
        plain_get = worker.store.get

        def get(keys, addresses, sizes):  # type: ignore[no-untyped-def]
            if fault in ("missing", "negative", "short"):
                statuses = plain_get(keys, addresses, sizes)
                return [FAULTS[fault]([k])[0] if k == bad_key else s for k, s in zip(keys, statuses, strict=True)]
            return FAULTS[fault](keys)

        worker.store.get = get  # type: ignore[method-assign]
        worker.load({6 + i: 100 + i for i in range(5)}, between_steps)
        failed = set(range(6, 11)) if fault in ("exception", "none", "too few", "too many") else {6 + position}
        if between_steps:
            assert worker.wait_loaded() == ({"r"}, {"r"})
        assert worker.worker.take_failed_blocks() == failed
        assert worker.worker.take_failed_blocks() == set()
        assert worker.worker.take_report() == LoadReport(failed=frozenset({"r"}))
        assert worker.worker.take_report() is None
        for i in range(5):
            if 6 + i not in failed:
                assert worker.read(6 + i) == worker.expected(100 + i)


@pytest.mark.parametrize("between_steps", [False, True])
def test_a35_late_bytes_never_reach_the_cache(between_steps: bool) -> None:
    with rig(load_timeout_s=0.05) as worker:
        worker.fill(1, 1)
        worker.save({1: 1})
        worker.drain()
        worker.store.gates["get"] = threading.Event()
        before = worker.read(4)
        worker.load({4: 1}, between_steps)
        if between_steps:
            assert worker.worker.take_loaded() == (set(), set())
            worker.clock.time = 1
            assert worker.wait_loaded() == ({"r"}, {"r"})
        assert worker.worker.take_failed_blocks() == {4}
        worker.store.gates["get"].set()
        assert worker.worker._loader is not None
        worker.worker._loader._threads.submit(lambda: None).result(10)
        worker.worker.close()
        assert worker.read(4) == before


@pytest.mark.parametrize("mode", MODES)
def test_a7_a_queued_save_never_stores_the_next_owners_bytes(mode: str) -> None:
    with rig(transfer=mode, fence_timeout_s=0.01) as worker:
        worker.fill(1, 1)
        worker.fill(2, 2)
        worker.store.gates["exist"] = threading.Event()
        worker.save({1: 1, 2: 2})
        worker.worker.begin_step(StepMetadata(overwritten=frozenset({1})))
        worker.fill(1, 99)
        worker.store.gates["exist"].set()
        worker.drain()
        values = [value for key, value in worker.store.objects.items() if not key.endswith("descriptor")]
        assert values == [worker.expected(2)]
        assert worker.worker.counters.totals()["save_blocks_dropped_overwritten"] == 1


def test_d23_a_slow_put_does_not_hold_the_step_when_packed() -> None:
    with rig(transfer="packed", fence_timeout_s=10) as worker:
        worker.fill(1, 1)
        worker.store.gates["put"] = threading.Event()
        worker.save({1: 1})
        assert worker.store.entered["put"].wait(10)
        worker.worker.begin_step(StepMetadata(overwritten=frozenset({1})))
        worker.fill(1, 99)
        worker.store.gates["put"].set()
        worker.drain()
        assert worker.expected(1) in worker.store.objects.values()


def test_a_direct_put_holds_its_blocks_until_it_has_read_them() -> None:
    with rig(transfer="direct", fence_timeout_s=0) as worker:
        worker.fill(1, 1)
        worker.store.gates["put"] = threading.Event()
        worker.save({1: 1})
        assert worker.store.entered["put"].wait(10)
        step = threading.Thread(target=worker.worker.begin_step, args=(StepMetadata(overwritten=frozenset({1})),))
        step.start()
        step.join(0.05)
        assert step.is_alive()
        worker.store.gates["put"].set()
        step.join(10)
        assert not step.is_alive()


def test_a_direct_put_holds_the_blocks_of_one_call_alone() -> None:
    store = DictStore()
    store.gates["put"] = threading.Event()
    with rig(store, transfer="direct", max_buffers_per_call=2 * PIECES, fence_timeout_s=0) as one:
        one.save({i: i for i in range(6)})
        assert store.entered["put"].wait(10)
        (ticket,) = one.worker._fence.tickets
        assert (ticket.reading, ticket.waiting) == ({0, 1}, {2, 3, 4, 5})
        store.gates["put"].set()
        one.drain()
    assert [len(keys) for call, keys in store.calls if call == "put"] == [2, 2, 2]


def test_learnt_transfer_is_packed_where_blocks_have_too_many_pieces(caplog: pytest.LogCaptureFixture) -> None:
    with rig(transfer="learnt", max_buffers_per_call=PIECES - 1) as one:
        one.fill(1, 11)
        one.save({1: 11})
        one.drain()
        assert one.worker.counters.totals()["save_blocks_stored"] == 1
    assert f"direct transfer is not possible here: {PIECES} pieces of a block" in caplog.text


def test_learnt_transfer_is_packed_where_the_cache_is_not_registered(caplog: pytest.LogCaptureFixture) -> None:
    class StagingAlone(DictStore):
        registered = 0

        def register(self, address: int, num_bytes: int) -> Status:
            self.registered += 1
            return Status.OK if self.registered == 1 else Status.INVALID

    with rig(StagingAlone(), transfer="learnt") as one:
        one.fill(1, 11)
        one.save({1: 11})
        one.drain()
        one.load({3: 11})
        assert one.read(3) == one.expected(11)
    assert "direct transfer is not possible here: the store did not register the KV cache" in caplog.text


def test_d10_an_ended_request_is_let_go_within_the_step() -> None:
    with rig(fence_timeout_s=0) as worker:
        worker.fill(1, 1)
        worker.store.gates["put"] = threading.Event()
        worker.save({1: 1}, final=True)
        assert worker.worker.take_saved() == {"r"}
        assert worker.worker.take_saved() == set()


class LateDevice(HostDevice):
    """A device whose work never lands."""

    def record_event(self):  # type: ignore[no-untyped-def]
        return self

    def wait(self, timeout_s: float) -> bool:
        assert timeout_s > 0
        return False


def test_a5_what_has_not_landed_is_not_stored() -> None:
    with rig(device=LateDevice()) as worker:
        worker.save({1: 1})
        worker.drain()
        assert [key for key in worker.store.objects if not key.endswith("descriptor")] == []
        assert worker.worker.counters.totals()["save_blocks_dropped_device_late"] == 1


class GatedEvent:
    """Happens when told."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.waited_for = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        self.waited_for.set()
        return self.happened.wait(timeout_s)


class GatedDevice(HostDevice):
    """A device whose work until now lands when told."""

    def __init__(self) -> None:
        self.events: list[GatedEvent] = []

    def record_event(self):  # type: ignore[no-untyped-def]
        self.events.append(GatedEvent())
        return self.events[-1]


@pytest.mark.parametrize("mode", MODES)
def test_a25_a_load_comes_after_what_steps_in_flight_still_write(mode: str) -> None:
    device = GatedDevice()
    with rig(device=device, transfer=mode) as worker:
        worker.fill(1, 1)
        worker.save({1: 1})
        device.events[-1].happened.set()
        worker.drain()
        worker.load({2: 1}, between_steps=True)
        assert device.events[-1].waited_for.wait(10)
        # A step that was planned before the block changed hands.
        worker.fill(2, 99)
        assert worker.worker.take_loaded() == (set(), set())
        device.events[-1].happened.set()
        assert worker.wait_loaded() == ({"r"}, set())
        assert worker.read(2) == worker.expected(1)


def test_a25_a_load_behind_a_device_that_is_late_fails() -> None:
    with rig() as worker:
        worker.fill(1, 1)
        worker.save({1: 1})
        worker.drain()
        worker.worker._device = LateDevice()
        worker.load({2: 1})
        assert worker.worker.take_failed_blocks() == {2}
        assert worker.read(2) == bytes(len(worker.read(2)))


@pytest.mark.parametrize("mode", MODES)
def test_a_withdrawn_save_is_no_outage(mode: str) -> None:
    with rig(transfer=mode, fence_timeout_s=0) as worker:
        worker.store.gates["exist"] = threading.Event()
        worker.save({1: 1})
        worker.worker.begin_step(StepMetadata(overwritten=frozenset({1})))
        worker.store.gates["exist"].set()
        worker.drain()
        worker.save({2: 2})
        worker.drain()
        counts = worker.worker.counters.totals()
        assert (counts["save_blocks_withdrawn"], counts["save_blocks_stored"]) == (1, 1)


def test_d15_a_load_that_is_late_is_an_outage_before_the_store_answers() -> None:
    with rig(load_timeout_s=0.01, outage_pause_s=100) as worker:
        worker.store.gates["get"] = threading.Event()
        worker.load({1: 1})
        assert worker.worker.take_failed_blocks() == {1}
        worker.save({2: 2})
        worker.drain()
        assert worker.worker.counters.totals()["save_blocks_dropped_outage"] == 1


def test_c5_only_missing_blocks_are_put() -> None:
    with rig() as worker:
        worker.save({1: 1, 2: 2})
        worker.drain()
        worker.save({1: 1, 3: 3, 2: 2})
        worker.drain()
        puts = [len(keys) for call, keys in worker.store.calls if call == "put"]
        assert puts == [2, 1]
        assert worker.worker.counters.totals()["save_blocks_present"] == 2


def test_d23_the_queue_is_bounded_and_drops_are_counted() -> None:
    with rig(max_queued_blocks=2) as worker:
        worker.store.gates["exist"] = threading.Event()
        worker.save({1: 1, 2: 2})
        worker.save({3: 3})
        assert worker.worker.counters.totals()["save_blocks_dropped_queue_full"] == 1
        worker.store.gates["exist"].set()
        worker.drain()
        worker.save({3: 3})
        worker.drain()
        assert worker.worker.counters.totals()["save_blocks_stored"] == 3


def test_saves_step_aside_while_the_store_is_down() -> None:
    with rig(outage_pause_s=5) as worker:
        worker.store.calls.clear()
        worker.store.answers["exist"] = lambda keys: [Status.UNAVAILABLE] * len(keys)
        worker.save({1: 1})
        worker.drain()
        worker.save({1: 1})
        worker.drain()
        assert [call for call, _ in worker.store.calls].count("exist") == 1
        del worker.store.answers["exist"]
        worker.clock.time = 5
        worker.save({1: 1})
        worker.drain()
        assert worker.worker.counters.totals()["save_blocks_stored"] == 1


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_f5_replicated_content_is_stored_once_by_all_ranks_together(tp: int) -> None:
    store = DictStore()
    topology = Topology(1, tp)
    contents = {block_id: block_id for block_id in range(NUM_BLOCKS)}
    for rank in topology.ranks():
        with rig(store, topology, rank) as worker:
            for block_id, content in contents.items():
                worker.fill(block_id, content)
            worker.save(contents)
    puts = [key for call, keys in store.calls if call == "put" for key in keys]
    assert len(puts) == len(set(puts)) == NUM_BLOCKS
    assert len(store.objects) == NUM_BLOCKS + 1


def test_a_block_of_too_many_pieces_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match='set transfer to "packed"'):
        Rig(transfer="direct", max_buffers_per_call=8)
    with pytest.raises(ConfigError, match="set staging_bytes to at least"):
        Rig(transfer="packed", staging_bytes=1000)


class GatedCopies(HostDevice):
    """A device on which the last block of a copy to the cache takes as long as told."""

    def __init__(self) -> None:
        self.last_byte = threading.Event()
        self.copying = threading.Event()

    def copier(self, *arguments: Any) -> Any:
        copier = super().copier(*arguments)
        scatter = copier.scatter

        def gated(block_ids: Sequence[int], address: int) -> None:
            self.copying.set()
            assert self.last_byte.wait(30), "the test never let it go"
            scatter(block_ids, address)

        copier.scatter = gated
        return copier


@pytest.mark.parametrize("between_steps", [False, True])
def test_a22_done_follows_the_last_byte(between_steps: bool) -> None:
    device = GatedCopies()
    with rig(device=device, transfer="packed") as worker:
        worker.fill(1, 1)
        worker.save({1: 1})
        worker.drain()
        loading = threading.Thread(target=worker.load, args=({4: 1}, between_steps))
        loading.start()
        assert device.copying.wait(30)
        if between_steps:
            loading.join(30)
            assert worker.worker.take_loaded() == (set(), set())
        # The bytes are here, in staging, and not in the cache: nothing may be said yet.
        assert worker.worker.take_report() is None
        assert "load_blocks_ok" not in worker.worker.counters.totals()
        device.last_byte.set()
        loading.join(30)
        if between_steps:
            assert worker.wait_loaded() == ({"r"}, set())
        assert worker.worker.take_report() == LoadReport(loaded=frozenset({"r"}))
        assert worker.read(4) == worker.expected(1)


NUM_FAILING = 3000
LOUD: dict[str, tuple[dict[str, object], str]] = {
    "load that misses": ({}, "load"),
    "load that fails": ({}, "load"),
    "load that raises": ({}, "load"),
    "load that answers out of form": ({}, "load"),
    "save that fails": ({}, "save"),
    "save that raises": ({}, "save"),
    "save that is lost": ({"audit_every": 1}, "save"),
    "save that is changed": ({"audit_every": 1}, "save"),
    "object that is corrupt": ({"integrity": "on"}, "load"),
}


@pytest.mark.parametrize("what", LOUD)
def test_h1_one_failure_is_at_most_two_lines(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_connector.answers._loudness", Loudness())
    caplog.set_level("DEBUG", "kvpool_connector")
    settings, kind = LOUD[what]
    with rig(transfer="packed", **settings) as worker:
        store = worker.store
        hashes = tuple(hashlib.sha256(b"%d" % i).digest() for i in range(NUM_FAILING))
        blocks = GroupBlocks(0, tuple(i % NUM_BLOCKS for i in range(NUM_FAILING)), hashes)
        save = StepMetadata(saves=(SaveJob("r", (blocks,)),))
        load = StepMetadata(loads=(LoadJob("r", (blocks,)),))
        if what == "object that is corrupt":
            worker.worker.end_step(save)
            worker.drain()
            for key, value in store.objects.items():
                store.objects[key] = bytes([value[0] ^ 1]) + value[1:]
        elif what in ("load that fails", "save that fails"):
            store.answers = dict.fromkeys(("exist", "get"), lambda keys: [Status.UNAVAILABLE] * len(keys))
        elif what in ("load that raises", "save that raises"):
            store.answers = dict.fromkeys(("exist", "get"), raising)
        elif what == "load that answers out of form":
            store.answers["get"] = lambda keys: []
        elif what == "save that is lost":
            store.answers["put"] = lambda keys: [Status.OK] * len(keys)
        elif what == "save that is changed":
            put = store.put

            def changed(keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
                statuses = put(keys, addresses, sizes)
                for key in keys:
                    store.objects[key] = bytes([store.objects[key][0] ^ 1]) + store.objects[key][1:]
                return statuses

            monkeypatch.setattr(store, "put", changed)
        caplog.clear()
        if kind == "save":
            worker.worker.end_step(save)
            worker.drain()
        else:
            worker.worker.begin_step(load)
            worker.worker.start_loads(load)
            assert len(worker.worker.take_failed_blocks()) == NUM_BLOCKS
        told = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
        assert told
        assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) <= 2
        assert len(told) <= 4
        assert all(len(line) < 400 for line in told)
        assert any(re.search(r"(blocks|keys|count)=\d+", line) for line in told), "how many is told"


def test_loads_are_timed_where_no_computing_overlaps_and_failed_ones_are_not() -> None:
    with rig() as worker:
        worker.fill(1, 11)
        worker.save({1: 11})
        worker.drain()
        for between in (False, True):
            worker.load({2: 11}, between_steps=between)
            if between:
                worker.wait_loaded()
            report = worker.worker.take_report()
            assert report is not None
            assert report.seconds == {"r": 0.0}
        worker.load({2: 12})
        report = worker.worker.take_report()
        assert report is not None
        assert (report.failed, report.seconds) == ({"r"}, {})


def test_a_numbered_step_is_told_of_once() -> None:
    with rig() as worker:
        step = StepMetadata(number=7)
        worker.worker.begin_step(step)
        worker.worker.end_step(step)
        report = worker.worker.take_report()
        assert report is not None
        assert report.step == 7
        assert worker.worker.take_report() is None


def test_of_all_ranks_the_slowest_load_counts() -> None:
    reports = [LoadReport(frozenset({"r"}), seconds={"r": seconds}, step=3) for seconds in (1.0, 3.0, 2.0)]
    merged = reports[0].merge(reports[1]).merge(reports[2])
    assert (merged.seconds, merged.step) == ({"r": 3.0}, 3)


def test_states_cannot_be_split_by_heads() -> None:
    settings = PoolSettings(kv_head_split=(2, 4), staging_bytes=3 << 20)
    worker = PoolWorker(settings, DictStore(), HostDevice(), Topology(4, 2), Rank(), ModelIdentity("tiny"))
    caches = {"model.layers.0.mamba": (torch.zeros(4, 3, 8), torch.zeros(4, 2, 8))}
    with pytest.raises(ConfigError, match=r'kv_head_split = \[2, 4\], but KV cache group 0 holds states.* to "rank"'):
        worker.register(caches, [GroupSpec(tuple(caches), 16, 4, kind="state")])
    worker.close()


def test_objects_cut_along_the_layers_and_by_heads() -> None:
    """One rank stores three layers and two heads as four objects; of two ranks the second loads the two of its head."""
    store, names = DictStore(), [f"model.layers.{i}.attn" for i in range(3)]
    cuts, both = LayerCuts.of((1, 2)), group({1: 7, 2: 8})

    def made(tp: int, rank: Rank) -> tuple[PoolWorker, dict[str, tuple[torch.Tensor, torch.Tensor]], RankShards]:
        settings = PoolSettings(kv_head_split="head", staging_bytes=3 << 20)
        topology = Topology(2, tp, cuts=cuts)
        worker = PoolWorker(settings, store, HostDevice(), topology, rank, ModelIdentity("tiny"))
        shape = (4, 16, 2 // tp, 8)
        caches = {name: (torch.zeros(shape), torch.zeros(shape)) for name in names}
        return worker, caches, worker.register(caches, [GroupSpec(tuple(names), 16, 4)])

    source, written, announced = made(1, Rank())
    assert [([x.label for x in d.layers], d.heads.first) for d in announced.descriptors[0]] == [
        (["0"], 0),
        (["0"], 1),
        (["1", "2"], 0),
        (["1", "2"], 1),
    ]
    for entry in written.values():
        for tensor in entry:
            tensor.copy_(torch.rand(tensor.shape))
    step = StepMetadata(saves=(SaveJob("r", (both,)),))
    source.begin_step(step)
    source.end_step(step)
    assert source.drain(60)
    target, read, announced = made(2, Rank(tp=1))
    assert len(announced.descriptors[0]) == 2
    step = StepMetadata(loads=(LoadJob("r", (both,)),))
    target.begin_step(step)
    target.start_loads(step)
    assert not target.take_failed_blocks()
    for name in names:
        for ours, theirs in zip(read[name], written[name], strict=True):
            assert torch.equal(ours[[1, 2], :, 0], theirs[[1, 2], :, 1])
            assert not ours[[0, 3]].any()
    source.close()
    target.close()
