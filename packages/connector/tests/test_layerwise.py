"""Layer by layer: nothing early, nothing half, nothing late, and exact failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from session_stores import SessionDictStore
from stores import DictStore
from test_worker import NUM_BLOCKS, Rig, group

from kvpool_connector.contract.errors import ConfigError
from kvpool_connector.contract.status import Status
from kvpool_connector.host import HostDevice
from kvpool_connector.layer_cost import Work
from kvpool_connector.layer_loader import LayerLoad
from kvpool_connector.metadata import LoadJob, SaveJob, StepMetadata

LAYERS = [f"model.layers.{i}.attn" for i in range(3)]
RANGE_BYTES = 16 * (32 + 8) * 2 + 16 * 16
CONTENTS = {1: 11, 5: 15, 2: 12}


class GatedDevice(HostDevice):
    """Events of the device happen when the test says so."""

    def __init__(self) -> None:
        self.gates: list[threading.Event] = []
        self.held = False

    def record_event(self):  # type: ignore[no-untyped-def]
        gate = threading.Event()
        if not self.held:
            gate.set()
        self.gates.append(gate)
        return gate


class LayerRig(Rig):
    """A rig whose steps call the layers' hooks."""

    store: SessionDictStore

    def __init__(self, store: SessionDictStore | None = None, **options: object) -> None:
        self.gated = GatedDevice()
        settings = {"use_layerwise": True, "layerwise_layers_per_transfer": 1, "fence_timeout_s": 0.01, **options}
        super().__init__(store or SessionDictStore(), device=self.gated, **settings)

    def key(self, content: int) -> str:
        return self.worker._part.shards[0].key(group({0: content}).block_hashes[0])

    def begin_save(self, contents: dict[int, int]) -> StepMetadata:
        step = StepMetadata(saves=(SaveJob("r", (group(contents),)),))
        self.worker.begin_step(step)
        return step

    def begin_load(self, contents: dict[int, int]) -> StepMetadata:
        step = StepMetadata(loads=(LoadJob("r", (group(contents),)),))
        self.worker.begin_step(step)
        self.worker.start_loads(step)
        return step

    def save_all(self, contents: dict[int, int], hooks: list[str] = LAYERS) -> None:
        for block_id, content in contents.items():
            self.fill(block_id, content)
        step = self.begin_save(contents)
        for layer in hooks:
            self.worker.save_layer(layer)
        self.worker.end_step(step)

    def load_all(self, contents: dict[int, int], hooks: list[str] = LAYERS) -> set[int]:
        step = self.begin_load(contents)
        for layer in hooks:
            self.worker.wait_layer(layer)
        self.worker.end_step(step)
        return self.worker.take_failed_blocks()

    def ended(self) -> bool:
        """True once everything under way has ended."""
        return self.worker.drain(10)

    def stored(self) -> dict[str, bytes]:
        return {key: value for key, value in self.store.objects.items() if not key.endswith("descriptor")}

    def counts(self) -> dict[str, int]:
        return self.worker.counters.totals()


@contextmanager
def layer_rig(store: SessionDictStore | None = None, **options: object) -> Iterator[LayerRig]:
    """A rig, closed at the end with nothing open in the store."""
    made = LayerRig(store, **options)
    try:
        yield made
    finally:
        for gate in (*made.store.range_gates.values(), *made.gated.gates):
            gate.set()
        made.worker.close()
        assert not made.store.open_puts, "put sessions stayed open"
        assert not made.store.open_gets, "get sessions stayed open"


def until(condition) -> None:  # type: ignore[no-untyped-def]
    """Wait for another thread."""
    for _ in range(10_000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came")


@pytest.mark.parametrize("per_transfer", [1, 2, 3, None])
def test_layers_make_the_objects_of_whole_transfer(per_transfer: int | None) -> None:
    store = SessionDictStore()
    with layer_rig(store, layerwise_layers_per_transfer=per_transfer) as source:
        source.save_all(CONTENTS)
        assert source.ended()
        assert source.stored() == {source.key(c): source.expected(c) for c in CONTENTS.values()}
        assert source.counts()["save_blocks_stored"] == 3
        source.save_all(CONTENTS)
        assert source.ended()
        assert source.counts()["save_blocks_present"] == 3
        assert not source.load_all({7: 15, 3: 11, 0: 12})
        for block_id, content in {7: 15, 3: 11, 0: 12}.items():
            assert source.read(block_id) == source.expected(content)
        assert source.counts()["load_blocks_ok"] == 3


def test_an_object_appears_when_its_last_layer_is_in() -> None:
    with layer_rig() as rig:
        for block_id, content in CONTENTS.items():
            rig.fill(block_id, content)
        step = rig.begin_save(CONTENTS)
        for done, layer in enumerate(LAYERS):
            assert not rig.stored()
            rig.worker.save_layer(layer)
            until(lambda done=done: len(rig.store.asked) == done + 1)
        assert not rig.stored(), "not before the step says that it is over"
        rig.worker.end_step(step)
        assert rig.ended()
        assert len(rig.stored()) == 3


def test_a5_a_layer_is_read_only_when_the_device_has_written_it() -> None:
    with layer_rig() as rig:
        rig.gated.held = True
        step = rig.begin_save({1: 11})
        for layer in LAYERS:
            rig.worker.save_layer(layer)
        rig.worker.end_step(step)
        assert not rig.worker.drain(0.05)
        assert not rig.store.asked
        rig.fill(1, 11)
        for gate in rig.gated.gates:
            gate.set()
        assert rig.ended()
        assert rig.stored() == {rig.key(11): rig.expected(11)}


@pytest.mark.parametrize("layer", range(3))
def test_a_failed_range_revokes_its_object_and_no_other(layer: int) -> None:
    with layer_rig() as rig:
        rig.store.range_faults[rig.key(15), layer * RANGE_BYTES] = Status.CORRUPT
        rig.save_all(CONTENTS)
        assert rig.ended()
        assert set(rig.stored()) == {rig.key(11), rig.key(12)}
        assert rig.store.revoked == [rig.key(15)]
        assert rig.counts()["save_blocks_corrupt"] == 1


def test_nothing_is_written_to_a_session_past_its_limit() -> None:
    with layer_rig(layerwise_session_limit_s=20) as rig:
        step = rig.begin_save({1: 11})
        rig.worker.save_layer(LAYERS[0])
        until(lambda: rig.store.asked)
        rig.clock.time = 20
        rig.worker.save_layer(LAYERS[1])
        rig.worker.save_layer(LAYERS[2])
        rig.worker.end_step(step)
        assert rig.ended()
        assert rig.store.asked == [("put", 0)]
        assert rig.store.revoked == [rig.key(11)]
        assert not rig.stored()
        assert rig.counts()["save_blocks_dropped_stale"] == 1


def test_a_whole_object_past_its_limit_is_revoked() -> None:
    with layer_rig(layerwise_session_limit_s=20) as rig:
        step = rig.begin_save({1: 11})
        for layer in LAYERS:
            rig.worker.save_layer(layer)
        until(lambda: len(rig.store.asked) == 3)
        rig.clock.time = 20
        rig.worker.end_step(step)
        assert rig.ended()
        assert not rig.stored()
        assert rig.counts()["save_blocks_dropped_stale"] == 1


@pytest.mark.parametrize("answer", [Status.NOT_READY, Status.MISS, Status.EXISTS])
def test_a_lost_key_is_not_stored(answer: Status) -> None:
    with layer_rig() as rig:
        rig.store.end_answers = lambda key: answer
        rig.save_all({1: 11})
        assert rig.ended()
        assert "save_blocks_stored" not in rig.counts()
        assert "save_blocks_present" not in rig.counts()
        assert rig.counts()["save_blocks_dropped_lost"] == 1
        assert rig.store.revoked == [rig.key(11)]


@pytest.mark.parametrize("hooks", [LAYERS[:2], LAYERS[1:], [LAYERS[0], *LAYERS], []], ids=str)
def test_a29_a_save_hook_that_is_not_called_once_stores_nothing(
    hooks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with layer_rig() as rig:
        for _ in range(3):
            rig.save_all({1: 11}, hooks)
            assert rig.ended()
        assert not rig.stored()
        assert rig.counts()["save_hook_faults"] == 3
        assert rig.counts()["save_blocks_dropped_hooks"] == 3
        assert sum("event=save_hook" in record.message for record in caplog.records) == 1
        rig.save_all({1: 11})
        assert rig.ended()
        assert len(rig.stored()) == 1


@pytest.mark.parametrize("missing", range(3))
def test_a29_a_layer_that_did_not_wait_fails_the_load(missing: int, caplog: pytest.LogCaptureFixture) -> None:
    with layer_rig() as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        hooks = [layer for i, layer in enumerate(LAYERS) if i != missing]
        for _ in range(2):
            assert rig.load_all({7: 15, 3: 11}, hooks) == {7, 3}
        assert sum("event=load_hook" in record.message for record in caplog.records) == 1
        assert not rig.load_all({7: 15, 3: 11})


def test_a3_a_wait_returns_when_all_of_the_layer_has_landed() -> None:
    with layer_rig() as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        rig.store.range_gates[RANGE_BYTES] = threading.Event()
        step = rig.begin_load({7: 15, 3: 11})
        rig.worker.wait_layer(LAYERS[0])
        waiter = threading.Thread(target=rig.worker.wait_layer, args=(LAYERS[1],))
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive(), "the wait returned before the layer was there"
        rig.store.range_gates[RANGE_BYTES].set()
        waiter.join(10)
        assert not waiter.is_alive()
        size = RANGE_BYTES
        assert rig.read(7)[size : 2 * size] == rig.expected(15)[size : 2 * size]
        rig.worker.wait_layer(LAYERS[2])
        rig.worker.end_step(step)
        assert rig.worker.take_failed_blocks() == set()


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("fault", [Status.MISS, Status.LEASE_EXPIRED, Status.CORRUPT, Status.UNAVAILABLE])
def test_a_failed_layer_fails_its_block_and_no_other(fault: Status, layer: int) -> None:
    with layer_rig() as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        rig.store.range_faults[rig.key(12), layer * RANGE_BYTES] = fault
        assert rig.load_all({7: 15, 3: 12, 0: 11}) == {3}
        assert rig.read(7) == rig.expected(15)
        assert rig.read(0) == rig.expected(11)
        assert rig.counts()[f"load_blocks_{fault.value}"] == 1


def test_a_block_that_is_not_there_fails_alone() -> None:
    with layer_rig() as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        assert rig.load_all({7: 15, 3: 99}) == {3}
        assert rig.read(7) == rig.expected(15)


def test_a35_bytes_that_come_after_the_deadline_never_reach_the_cache() -> None:
    with layer_rig(load_timeout_s=0.05) as rig:
        rig.save_all({1: 11})
        assert rig.ended()
        before = rig.read(4)
        rig.store.range_gates = {0: threading.Event()}
        assert rig.load_all({4: 11}) == {4}
        rig.store.range_gates[0].set()
        rig.worker.close()
        assert rig.read(4)[:RANGE_BYTES] == before[:RANGE_BYTES]


def test_get_sessions_are_renewed_before_their_lease_ends() -> None:
    with layer_rig(layerwise_renew_s=2, layerwise_prefetch_layers=1) as rig:
        rig.save_all({1: 11})
        assert rig.ended()
        step = rig.begin_load({4: 11})
        rig.worker.wait_layer(LAYERS[0])
        until(lambda: ("get", RANGE_BYTES) in rig.store.asked)
        assert len(rig.store.begun_gets) == 1
        rig.clock.time = 2
        rig.worker.wait_layer(LAYERS[1])
        rig.worker.wait_layer(LAYERS[2])
        rig.worker.end_step(step)
        assert len(rig.store.begun_gets) == 2
        assert rig.worker.take_failed_blocks() == set()
        assert rig.read(4) == rig.expected(11)


def test_a_load_that_ends_late_does_not_end_the_sessions_of_the_next() -> None:
    with layer_rig() as rig:
        rig.save_all({1: 11})
        assert rig.ended()
        late, slow = threading.Event(), threading.Event()
        rig.store.range_gates = {RANGE_BYTES: late}
        rig.store.asked.clear()
        rig.begin_load({4: 11})
        until(lambda: ("get", 2 * RANGE_BYTES) in rig.store.asked)
        given_up = rig.worker._layer_load
        assert given_up is not None
        rig.store.range_gates = {2 * RANGE_BYTES: slow}
        step = rig.begin_load({5: 11})
        assert rig.worker.take_failed_blocks() == {4}
        until(lambda: rig.store.asked[-2:] == [("get", RANGE_BYTES), ("get", 2 * RANGE_BYTES)])
        late.set()
        until(lambda: not any(given_up.missing.values()))
        slow.set()
        for layer in LAYERS:
            rig.worker.wait_layer(layer)
        rig.worker.end_step(step)
        assert rig.worker.take_failed_blocks() == set()
        assert rig.read(5) == rig.expected(11)


def test_a_range_that_is_left_out_after_the_deadline_fails_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    with layer_rig() as rig:
        rig.save_all({1: 11})
        assert rig.ended()
        threads, late = rig.worker._layer_loader._threads, []
        submit, withdraw = threads.submit, LayerLoad.withdraw

        def submit_all_but_the_last(move, load, piece, part):  # type: ignore[no-untyped-def]
            if piece.index < 2:
                submit(move, load, piece, part)
            else:
                late.append(lambda: move(load, piece, part))

        def withdraw_and_let_it_begin(load: LayerLoad) -> None:
            withdraw(load)
            while late:
                late.pop()()

        monkeypatch.setattr(threads, "submit", submit_all_but_the_last)
        monkeypatch.setattr(LayerLoad, "withdraw", withdraw_and_let_it_begin)
        step = rig.begin_load({4: 11})
        rig.worker.wait_layer(LAYERS[0])
        rig.worker.wait_layer(LAYERS[1])
        rig.clock.time = 1000
        rig.worker.wait_layer(LAYERS[2])
        rig.worker.end_step(step)
        assert rig.read(4) != rig.expected(11)
        assert rig.worker.take_failed_blocks() == {4}
        assert rig.counts()["load_blocks_timeout"] == 1


def test_two_requests_load_one_key() -> None:
    with layer_rig() as rig:
        rig.save_all({1: 11})
        assert rig.ended()
        step = StepMetadata(loads=(LoadJob("a", (group({4: 11}),)), LoadJob("b", (group({5: 11}),))))
        rig.worker.begin_step(step)
        rig.worker.start_loads(step)
        for layer in LAYERS:
            rig.worker.wait_layer(layer)
        rig.worker.end_step(step)
        assert rig.worker.take_failed_blocks() == set()
        assert rig.read(4) == rig.read(5) == rig.expected(11)


def test_a_save_neither_revokes_nor_ends_what_another_save_of_that_key_has_half_written() -> None:
    with layer_rig() as rig:
        begin_put, late, later = rig.store.begin_put, threading.Event(), threading.Event()
        rig.store.range_gates = {RANGE_BYTES: late}
        rig.save_all({1: 11})
        until(lambda: {("put", 0), ("put", RANGE_BYTES)} <= set(rig.store.asked))
        # Of the second save the store does not say whether it began. (The type checker allows no such replacement.)
        rig.store.begin_put = lambda keys, sizes: [Status.TIMEOUT] * len(keys)  # type: ignore[method-assign]
        rig.save_all({2: 11})
        until(lambda: rig.counts().get("save_queue_left") == 1)
        rig.store.begin_put = begin_put  # type: ignore[method-assign]
        # A third would begin anew if the second had revoked, and the first would end it without its first layer.
        rig.clock.time = 6  # No outage lasts so long.
        rig.store.range_gates[0] = later
        rig.save_all({3: 11})
        until(lambda: rig.counts().get("save_queue_left") == 2 or rig.store.asked.count(("put", 0)) == 2)
        late.set()
        until(lambda: rig.counts().get("save_queue_left") == 3 or rig.stored())
        later.set()
        assert rig.ended()
        assert rig.stored() == {rig.key(11): rig.expected(11)}
        assert rig.store.revoked == []
        assert rig.counts()["save_blocks_stored"] == 1
        assert rig.counts()["save_blocks_present"] == 2


def test_loads_run_ahead_no_further_than_told() -> None:
    with layer_rig(layerwise_prefetch_layers=1) as rig:
        rig.save_all({1: 11})
        assert rig.ended()
        rig.store.asked.clear()
        step = rig.begin_load({4: 11})
        assert rig.worker._layer_load is not None
        assert [piece.index for piece, _ in rig.worker._layer_load.queue] == [2]
        rig.worker.wait_layer(LAYERS[1])
        assert not rig.worker._layer_load.queue
        rig.worker.wait_layer(LAYERS[0])
        rig.worker.wait_layer(LAYERS[2])
        rig.worker.end_step(step)
        assert rig.worker.take_failed_blocks() == set()


def test_a7_a_block_that_is_overwritten_in_mid_object_is_revoked() -> None:
    with layer_rig() as rig:
        rig.fill(3, 13)
        rig.fill(4, 14)
        step = rig.begin_save({3: 13, 4: 14})
        rig.worker.save_layer(LAYERS[0])
        rig.worker.save_layer(LAYERS[1])
        rig.gated.held = True
        rig.worker.save_layer(LAYERS[2])
        rig.worker.end_step(step)
        until(lambda: len(rig.store.asked) == 2)
        rig.worker.begin_step(StepMetadata(overwritten=frozenset({3})))
        rig.fill(3, 99)
        for gate in rig.gated.gates:
            gate.set()
        assert rig.ended()
        assert rig.stored() == {rig.key(14): rig.expected(14)}
        assert rig.store.revoked == [rig.key(13)]


def test_a_step_that_breaks_off_leaves_nothing() -> None:
    with layer_rig() as rig:
        rig.begin_save({1: 11})
        rig.worker.save_layer(LAYERS[0])
        rig.begin_load({4: 11})
        rig.worker.begin_step(StepMetadata())
        assert rig.ended()
        assert not rig.stored()
        assert rig.worker.take_failed_blocks() == {4}
        assert rig.counts()["save_blocks_dropped_step_broken"] == 1


def test_c14_exactly_hit_times_layers_reads() -> None:
    with layer_rig() as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        rig.store.asked.clear()
        assert not rig.load_all({7: 15, 3: 11, 0: 12})
        assert sorted(rig.store.asked) == [("get", i * RANGE_BYTES) for i in range(3)]


def test_the_queue_is_bounded() -> None:
    with layer_rig(max_queued_blocks=2) as rig:
        rig.gated.held = True
        rig.save_all({1: 11, 2: 12})
        rig.save_all({3: 13})
        assert rig.counts()["save_blocks_dropped_queue_full"] == 1
        for gate in rig.gated.gates:
            gate.set()
        assert rig.ended()
        rig.gated.held = False
        rig.save_all({3: 13})
        assert rig.ended()
        assert len(rig.stored()) == 3


def test_blocks_of_other_steps_are_not_touched() -> None:
    with layer_rig() as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        before = {block_id: rig.read(block_id) for block_id in range(NUM_BLOCKS)}
        assert not rig.load_all({7: 15})
        for block_id in range(NUM_BLOCKS):
            assert rig.read(block_id) == (rig.expected(15) if block_id == 7 else before[block_id])


@pytest.mark.parametrize("mode", [True, "auto"])
def test_a_store_without_sessions_is_refused(mode: object) -> None:
    with pytest.raises(ConfigError, match="has no sessions"):
        Rig(DictStore(), use_layerwise=mode)


def calls(rig: LayerRig) -> set[str]:
    """Whether ranges were written and read since the last call."""
    made = {call for call, _ in rig.store.asked}
    rig.store.asked.clear()
    return made


def test_auto_moves_a_step_the_way_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Work]] = []
    answers = iter([True, False, False, True])

    def pays(work: list[Work]) -> bool:
        asked.append(work)
        return next(answers)

    monkeypatch.setattr("kvpool_connector.worker.pays", pays)
    with layer_rig(use_layerwise="auto") as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        assert calls(rig) == {"put"}
        assert not rig.load_all({7: 15, 3: 11})
        assert calls(rig) == set()
        rig.save_all({4: 14, 6: 16})
        assert rig.ended()
        assert calls(rig) == set()
        assert rig.stored() == {rig.key(c): rig.expected(c) for c in (11, 15, 12, 14, 16)}
        assert not rig.load_all({0: 14, 7: 16})
        assert calls(rig) == {"get"}
        assert [rig.read(block_id) for block_id in (0, 7, 3)] == [rig.expected(c) for c in (14, 16, 11)]
        assert asked == [[Work(count, 3 * RANGE_BYTES, 3)] for count in (3, 2, 2, 2)]


def test_auto_drops_what_true_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_connector.worker.pays", lambda work: True)
    with layer_rig(use_layerwise="auto", max_queued_blocks=2) as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        assert not rig.stored()
        assert rig.counts()["save_blocks_dropped_queue_full"] == 3


def test_auto_moves_tiny_blocks_whole() -> None:
    with layer_rig(use_layerwise="auto") as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        assert not rig.load_all({7: 15, 3: 11})
        assert calls(rig) == set()
        assert len(rig.stored()) == 3


def raising(keys: list[str]) -> list[Status]:
    raise RuntimeError("broken store")


FORMS = {
    "missing": lambda keys: [Status.MISS] * len(keys),
    "negative": lambda keys: [Status.INVALID] * len(keys),
    "short": lambda keys: [Status.CORRUPT] * len(keys),
    "exception": raising,
    "none": lambda keys: None,
    "too few": lambda keys: [Status.OK] * (len(keys) - 1),
    "too many": lambda keys: [Status.OK] * (len(keys) + 1),
}
OF_ALL = ("exception", "none", "too few", "too many")
"""Answers that say nothing of any key."""


def answer_wrongly(rig: LayerRig, call: str, fault: str, bad_key: str) -> None:
    """The store does what it is asked, and then says something else: of one key, or nothing of any."""
    right = getattr(rig.store, call)

    def wrong(keys, *arguments):  # type: ignore[no-untyped-def]
        statuses = right(keys, *arguments)
        if fault in OF_ALL:
            return FORMS[fault](keys)
        return [FORMS[fault]([key])[0] if key == bad_key else one for key, one in zip(keys, statuses, strict=True)]

    setattr(rig.store, call, wrong)


@pytest.mark.parametrize("position", range(3), ids=["first", "middle", "last"])
@pytest.mark.parametrize("fault", FORMS)
@pytest.mark.parametrize("call", ["begin_get", "get_ranges"])
def test_a9_exactly_the_affected_blocks_are_reported_once(call: str, fault: str, position: int) -> None:
    with layer_rig() as rig:
        rig.save_all(CONTENTS)
        assert rig.ended()
        moved = {7: 11, 3: 15, 0: 12}
        bad = list(moved)[position]
        answer_wrongly(rig, call, fault, rig.key(moved[bad]))
        failed = set(moved) if fault in OF_ALL else {bad}
        assert rig.load_all(moved) == failed
        assert rig.worker.take_failed_blocks() == set()
        for block_id in set(moved) - failed:
            assert rig.read(block_id) == rig.expected(moved[block_id])


@pytest.mark.parametrize("fault", FORMS)
@pytest.mark.parametrize("call", ["begin_put", "put_ranges", "end_put"])
def test_what_the_store_did_not_say_is_stored_is_not_counted_and_left_open_by_nobody(call: str, fault: str) -> None:
    with layer_rig() as rig:
        answer_wrongly(rig, call, fault, rig.key(15))
        rig.save_all(CONTENTS)
        assert rig.ended()
        stored = rig.counts().get("save_blocks_stored", 0)
        assert stored == (0 if fault in OF_ALL else 2)
        if call != "end_put":
            # Of an end whose answer was lost the object may be there: whole, by our own count.
            assert len(rig.stored()) == stored
        if call == "begin_put" and fault in ("missing", "negative", "short"):
            rig.store.revoke_put([rig.key(15)])
