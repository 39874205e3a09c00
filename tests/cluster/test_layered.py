"""Layer by layer in every shape of cluster: the objects of whole-request transfer, and exact failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool_connector.layer_loader import LayerLoader
from kvpool_connector.layer_saver import LayerSaver
from kvpool_simulator.engine import Limits, Mix
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
