"""Layer by layer in every shape of cluster: the objects of whole-request transfer, and exact failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool_connector.contract.status import Status
from kvpool_connector.layer_loader import LayerLoader
from kvpool_connector.layer_saver import LayerSaver
from kvpool_connector.mooncake import MooncakeStore
from kvpool_connector.scheduler import PoolScheduler
from kvpool_simulator.engine import Limits, Mix, Timing
from kvpool_simulator.store import SimulatedMaster
from tests.cluster.cluster import run
from tests.cluster.deployed import Deployed, pool
from tests.cluster.scenario import HYBRID, Scenario, Shape
from tests.cluster.test_topologies import SHAPES, check_bytes, check_gaps_are_filled, check_lost_objects

LAYERS: dict[str, Any] = {"use_layerwise": True, "layerwise_layers_per_transfer": 1}
FEW = (
    *("tp4-heads4", "tp8-heads2", "tp8-sparse", "pp3-uneven-mtp-last", "pp2-cut-in-4", "pp1-cut-in-3"),
    *("pcp2-interleave1", "dcp4-interleave1", "pcp2-dcp2-interleave8", "pp2-pcp2-dcp2-tp4-mtp"),
)


@pytest.fixture
def master() -> Iterator[SimulatedMaster]:
    with pool() as master:
        yield master


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often blocks went layer by layer."""
    count: Counter[str] = Counter()
    for owner, name in ((LayerSaver, "open"), (LayerLoader, "start")):
        right: Any = getattr(owner, name)

        def counting(self: Any, moves: Any, *more: Any, right: Any = right, name: str = name) -> Any:
            # What the run's audit loads at its end is no step of the engine's.
            count[name] += any(not str(move).startswith("audit-") for move in moves)
            return right(self, moves, *more)

        monkeypatch.setattr(owner, name, counting)
    return count


@pytest.mark.parametrize("name", SHAPES)
def test_layers_and_whole_blocks_serve_each_other(master: SimulatedMaster, used: Counter[str], name: str) -> None:
    """Byte for byte the same objects, on every rank of every shape; each way loads what the other stored."""
    whole = Deployed(SHAPES[name], master)
    layers = whole.beside(SHAPES[name], **LAYERS)
    stored = []
    for source, target in ((whole, layers), (layers, whole)):
        prompt = source.prompt("both ways", 3)
        source.save(prompt)
        stored.append(source.objects())
        target.announced = source.announced
        assert target.hit(prompt) == 3
        for rank in target.ranks:
            loaded = target.load(prompt, rank)
            assert not loaded.failed
            assert not loaded.wrong, loaded.wrong[:4]
        for key in stored[-1]:
            source.remove(key)
    assert stored[0] == stored[1]
    assert used["open"] > 0
    assert used["start"] > 0


@pytest.mark.parametrize("name", FEW)
def test_all_ranks_load_what_all_save_and_a_lost_object_fails_its_block_alone(
    master: SimulatedMaster, name: str
) -> None:
    deployed = Deployed(SHAPES[name], master, **LAYERS)
    check_bytes(deployed)
    check_lost_objects(deployed)


@pytest.mark.parametrize("name", ["tp1-sparse", "pp2-cut-in-4", "pp1-cut-in-3", "tp4-heads4", "pcp2-interleave1"])
def test_the_object_that_is_gone_is_stored_again(master: SimulatedMaster, name: str) -> None:
    check_gaps_are_filled(Deployed(SHAPES[name], master, **LAYERS))


@pytest.mark.parametrize("name", ["tp1-heads8", "tp2-heads8", "tp4-heads4", "tp2-heads2"])
@pytest.mark.parametrize("integrity", ["off", "on"])
def test_heads_that_are_objects_of_their_own(
    master: SimulatedMaster, used: Counter[str], name: str, integrity: str
) -> None:
    """`kv_head_split`: several shards of one block on one rank, each with ranges of its own."""
    split = {"kv_head_split": "head", "integrity": integrity}
    whole = Deployed(SHAPES[name], master, **split)
    layers = whole.beside(SHAPES[name], **LAYERS)
    check_bytes(layers)
    prompt = layers.prompt("heads", 3)
    layers.save(prompt)
    by_layers = layers.objects()
    whole.announced = layers.announced
    for rank in whole.ranks:
        loaded = whole.load(prompt, rank)
        assert not loaded.failed
        assert not loaded.wrong, loaded.wrong[:4]
    for key in by_layers:
        whole.remove(key)
    for name_of_prompt, count in (("bytes", 5), ("heads", 3)):
        whole.save(whole.prompt(name_of_prompt, count))
    assert whole.objects() == by_layers
    assert used["open"] > 0


CHUNKED: dict[str, tuple[Shape, dict[str, Any]]] = {
    "sparse with MTP": (Shape("tiny-deepseek-v3.2", 2, options={"mtp": True}), {}),
    "C8": (Shape("tiny-deepseek-v3.2", options={"sparse": "split", "c8": True}), {}),
    "GQA": (Shape("tiny-qwen3-32b", 2), {}),
    "GQA, a head an object": (Shape("tiny-qwen3-32b", 1), {"kv_head_split": "head"}),
    "pipeline": (SHAPES["pp4-uneven-mtp-last"], {}),
    "pipeline and context": (SHAPES["pp2-pcp2-dcp2-tp4-mtp"], {}),
    "prefill context": (SHAPES["pcp2-interleave1"], {}),
    "decode context": (SHAPES["dcp4-interleave1"], {}),
    "two groups": (Shape(HYBRID, block_sizes=(16, 32), window=33), {}),
    "checksums": (Shape("tiny-deepseek-v3.2", 2), {"integrity": "on", "audit_every": 2}),
}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("what", CHUNKED)
def test_blocks_that_several_steps_complete(used: Counter[str], what: str, asynchronous: bool) -> None:
    """Chunks of fewer tokens than a block: its object appears when the last layer of its last token is in."""
    shape, settings = CHUNKED[what]
    tokens = max(shape.block_sizes) * shape.pcp * shape.dcp
    outcome = run(
        Scenario(
            7,
            "named",
            shape,
            Limits(
                num_blocks=40,
                max_batched_tokens=4096,
                max_chunk=tokens * 2 // 3,
                caching=False,
                asynchronous=asynchronous,
            ),
            num_requests=14,
            mix=Mix(num_documents=1, document_tokens=3 * tokens, longest_question=tokens, longest_answer=4, chats=0.3),
            arrival_s=0.05,
            settings={"load_async": False, **LAYERS, **settings},
        )
    )
    assert outcome.violations == []
    assert outcome.num_missing == 0
    assert outcome.num_loads > 0
    assert outcome.num_audited > 0
    assert used["open"] > 0
    # With several groups loads are between steps, and whole.
    assert (used["start"] > 0) == (what != "two groups")


def test_an_object_that_appears_before_its_last_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a session ended with a layer missing, the run would say so."""
    right = LayerSaver._end

    def too_early(self: LayerSaver, number: int, shard: Any) -> None:
        for one in shard.objects:
            one.left = 0
        right(self, number, shard)

    def dropping(self: LayerSaver, save: Any, shard: Any, piece: Any, event: Any) -> None:
        if piece.index:
            right_write(self, save, shard, piece, event)

    right_write = LayerSaver._write
    monkeypatch.setattr(LayerSaver, "_end", too_early)
    monkeypatch.setattr(LayerSaver, "_write", dropping)
    with pytest.raises(AssertionError):
        test_blocks_that_several_steps_complete(Counter(open=1, start=1), "GQA", False)


class Happened:
    """An event that is never waited for."""

    def wait(self, timeout_s: float) -> bool:
        return True


@pytest.mark.parametrize("waits", [True, False], ids=["as it is", "without waiting for the device"])
def test_a5_layers_are_saved_only_when_a_slow_device_has_written_them(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """A layer's hook is called when its work is queued; the device writes it 10 ms and more later."""
    if not waits:
        right: Any = LayerSaver._write
        monkeypatch.setattr(
            LayerSaver, "_write", lambda self, save, shard, piece, event: right(self, save, shard, piece, Happened())
        )
    outcome = run(
        Scenario(
            11,
            "named",
            Shape("tiny-deepseek-v3.2", 2, options={"mtp": True}),
            Limits(num_blocks=60, max_batched_tokens=256, asynchronous=True),
            num_requests=20,
            mix=Mix(num_documents=3, document_tokens=64, longest_question=40, longest_answer=6, chats=0.3),
            timing=Timing(layer_s=0.01),
            arrival_s=0.02,
            rates={"slow": 0.3, "device_late": 0.3},
            settings={"load_async": False, **LAYERS},
        )
    )
    assert outcome.num_audited > 0
    assert (outcome.violations == []) == waits


def crowded(**settings: object) -> Scenario:
    """Many requests in a small cache, a third of them aborted, whole prompts in several chunks: preemptions too."""
    return Scenario(
        3,
        "named",
        Shape("tiny-deepseek-v3.2", 2, options={"mtp": True}),
        Limits(num_blocks=24, max_batched_tokens=40, max_requests=16, asynchronous=True),
        num_requests=60,
        mix=Mix(num_documents=4, document_tokens=96, longest_question=60, longest_answer=20, aborts=0.35),
        timing=Timing(layer_s=0.002),
        arrival_s=0.005,
        settings={"load_async": False, **LAYERS, **settings},
    )


def test_preemption_abort_and_finish_in_mid_object_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: Counter[str] = Counter()
    right: Any = PoolScheduler.build_step

    def counting(self: Any, *arguments: Any, **more: Any) -> Any:
        step = right(self, *arguments, **more)
        preempted["overwritten"] += bool(step.overwritten)
        return step

    monkeypatch.setattr(PoolScheduler, "build_step", counting)
    outcome = run(crowded())
    assert outcome.violations == []
    assert outcome.num_loads > 0
    assert preempted["overwritten"] > 0
    assert outcome.counters["save_blocks_dropped_overwritten"] > 0


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (MooncakeStore, "revoke_put", lambda self, keys: [Status.OK] * len(keys)),
        (MooncakeStore, "end_get", lambda self, keys: None),
    ],
    ids=["given up and not revoked", "read and not closed"],
)
def test_sessions_that_stay_open_are_found(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Any) -> None:
    monkeypatch.setattr(owner, name, wrong)
    if name == "revoke_put":
        # No save is whole by its own count.
        monkeypatch.setattr(MooncakeStore, "put_ranges", lambda self, keys, *_: [Status.CORRUPT] * len(keys))
    assert any("stayed open" in text for text in run(crowded()).violations)
