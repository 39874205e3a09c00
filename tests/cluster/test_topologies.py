"""Every shape of cluster by name: who writes, who is asked, what comes back, and what a lost object ends."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool_connector.contract.device import Event
from kvpool_connector.contract.errors import TopologyError
from kvpool_connector.contract.shards import ShardMap
from kvpool_connector.contract.topology import ContextRange, HeadRange, Topology, Writer
from kvpool_connector.rank_part import ShardBlocks
from kvpool_connector.saver import Saver, _Job
from kvpool_connector.worker import PoolWorker
from kvpool_simulator.engine import Limits, Mix
from kvpool_simulator.store import SimulatedMaster
from tests.cluster.cluster import run
from tests.cluster.deployed import Deployed, Prompt, pool
from tests.cluster.scenario import Scenario, Shape

KEYS_PAGE = (Path(__file__).parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")
HEADS = {1: "tiny-one-head", 2: "tiny-qwen3-32b", 4: "tiny-qwen3-235b", 8: "tiny-eight-heads"}
MTP: dict[str, Any] = {"mtp": True}
MLA, SPARSE, GLM = "tiny-deepseek-v3", "tiny-deepseek-v3.2", "tiny-glm-5.2"


SHAPES: dict[str, Shape] = {
    **{f"tp{tp}-heads{heads}": Shape(HEADS[heads], tp) for heads in HEADS for tp in (1, 2, 4, 8, 16)},
    **{f"tp{tp}-sparse": Shape(SPARSE, tp, options=MTP) for tp in (1, 2, 3, 4, 5, 8, 16)},
    "pp2-mtp-last": Shape(SPARSE, pp=2, options=MTP),
    "pp3-uneven-mtp-last": Shape(GLM, 2, 3, options=MTP, stages=(3, 2, 1)),
    "pp4-uneven-mtp-last": Shape(GLM, 1, 4, options=MTP, stages=(1, 2, 2, 1)),
    "pp2-cut-in-4": Shape(GLM, 2, 2, options=MTP, stages=(4, 2), cuts=(2, 2, 1, 1)),
    "pp1-cut-in-3": Shape(GLM, 2, options=MTP, cuts=(1, 2, 3)),
    "pp4-tp2-default-stages": Shape(GLM, 2, 4, options=MTP),
    "pp4-heads4-tp2": Shape("tiny-eight-heads", 2, 2),
    **{f"pcp{pcp}-interleave{n}": Shape(SPARSE, 2, pcp=pcp, interleave=n) for pcp, n in ((2, 1), (4, 4), (8, 16))},
    **{f"dcp{dcp}-interleave{n}": Shape(MLA, 8, dcp=dcp, interleave=n) for dcp, n in ((2, 16), (4, 1), (8, 4))},
    "pcp2-dcp2-interleave8": Shape(SPARSE, 4, pcp=2, dcp=2, interleave=8),
    "pcp2-dcp4-interleave1": Shape(MLA, 8, pcp=2, dcp=4, interleave=1),
    "pcp8-dcp2-interleave16": Shape(MLA, 2, pcp=8, dcp=2, interleave=16),
    "dcp2-heads2-tp8": Shape("tiny-qwen3-32b", 8, dcp=2, interleave=4),
    "pcp4-heads4-tp4": Shape("tiny-qwen3-235b", 4, pcp=4, interleave=2),
    "pp2-pcp2-dcp2-tp4-mtp": Shape(GLM, 4, 2, 2, 2, 16, MTP, stages=(4, 2)),
}
FIRST_SPARSE_RUN = Shape(
    "narrow-deepseek-v3.2", 8, pcp=2, dcp=1, interleave=128, options={"sparse": "bundled"}, block_sizes=(128,)
)
"""What the first sparse pool was tested with (vLLM-Ascend #6339): TP 8, PCP 2, DCP 1, interleave 128, 61 layers."""


@pytest.fixture
def master() -> Iterator[SimulatedMaster]:
    with pool() as master:
        yield master


def num_shards(shape: Shape) -> int:
    """Different contents that one logical block has, counted by hand."""
    heads = next((heads for heads, model in HEADS.items() if model == shape.model), 1)
    return max(shape.pp, len(shape.cuts)) * shape.pcp * shape.dcp * min(heads, shape.tp)


def check_bytes(deployed: Deployed) -> None:
    """What all ranks save together, every rank loads, into other blocks."""
    prompt = deployed.prompt("bytes", 5)
    deployed.save(prompt)
    assert deployed.hit(prompt) == 5
    assert deployed.hit(prompt, local=2) == 3
    for rank in deployed.ranks:
        loaded = deployed.load(prompt, rank)
        assert not loaded.failed
        assert not loaded.wrong, loaded.wrong[:4]


def check_lost_objects(deployed: Deployed) -> None:
    """Whichever rank's object is gone: the hit ends in front of it, and exactly its holders report it."""
    prompt = deployed.prompt("lost", 3)
    deployed.save(prompt)
    assert_hits_end_at_lost_objects(deployed, prompt)
    last = deployed.ranks[-1]
    key = deployed.keys(prompt, 1, last)[0]
    with deployed.lost(key):
        for rank in deployed.ranks:
            loaded = deployed.load(prompt, rank)
            assert loaded.failed == ({1} if key in deployed.keys(prompt, 1, rank) else set())
            assert not loaded.wrong, loaded.wrong[:4]


def assert_hits_end_at_lost_objects(deployed: Deployed, prompt: Prompt) -> None:
    count = len(prompt.hashes)
    for number, rank in enumerate(deployed.ranks):
        index = number % count
        for key in deployed.keys(prompt, index, rank):
            with deployed.lost(key):
                assert deployed.hit(prompt) == index, f"without {key} of {rank}"
        assert deployed.hit(prompt) == count


def check_gaps_are_filled(deployed: Deployed) -> None:
    """Whichever single object is gone is stored again, and only that, whatever else of its block is there."""
    prompt = deployed.prompt("gaps", 2)
    deployed.save(prompt)
    whole = deployed.objects()
    for rank in (deployed.ranks[0], deployed.ranks[-1]):
        for key in deployed.keys(prompt, 1, rank):
            deployed.remove(key)
            assert deployed.hit(prompt) == 1
            deployed.save(prompt)
            assert deployed.hit(prompt) == 2, f"{key} of {rank} was not stored again"
            assert deployed.objects() == whole


def check_shared_writing(deployed: Deployed) -> None:
    """The ranks' writes are a partition of the blocks, and stay one behind a prefix that is in the pool already."""
    first = deployed.prompt("first", 6)
    writes = deployed.save(first)
    assert_partition(deployed, writes, range(6), first.hashes)
    second = deployed.prompt("second", 12, after=first)
    assert deployed.hit(second) == second.num_shared == 3
    writes = deployed.save(second, first=second.num_shared)
    assert_partition(deployed, writes, range(3, 12), second.hashes)
    assert deployed.hit(second) == 12
    for rank in (deployed.ranks[0], deployed.ranks[-1]):
        loaded = deployed.load(second, rank)
        assert not loaded.failed
        assert not loaded.wrong, loaded.wrong[:4]


def assert_partition(deployed: Deployed, writes: dict[Any, list[str]], blocks: range, hashes: list[bytes]) -> None:
    written = Counter(key for keys in writes.values() for key in keys)
    assert set(written.values()) == {1}, "two ranks dealt with one object"
    for index in blocks:
        mine = [key for key in written if key.endswith(hashes[index].hex())]
        assert len(mine) == num_shards(deployed.shape), f"block {index}: {len(mine)} objects were dealt with"
    assert len(written) == num_shards(deployed.shape) * len(blocks)


def check_other_split(deployed: Deployed) -> None:
    """A pool serves whoever splits tokens over as many ranks, however prefill and decode share them."""
    prompt = deployed.prompt("split", 4)
    deployed.save(prompt)
    shape = deployed.shape
    other = deployed.beside(replace(shape, tp=shape.pcp, pcp=shape.dcp, dcp=shape.pcp))
    other.save(other.prompt("another", 1))
    assert other.hit(prompt) == 4
    for rank in other.ranks:
        loaded = other.load(prompt, rank)
        assert not loaded.failed
        assert not loaded.wrong, loaded.wrong[:4]


@pytest.mark.parametrize("name", ["pcp2-dcp4-interleave1", "pcp8-dcp2-interleave16"])
def test_context_parallelism_split_otherwise_shares_the_pool(master: SimulatedMaster, name: str) -> None:
    check_other_split(Deployed(SHAPES[name], master))


@pytest.mark.parametrize("name", SHAPES)
def test_what_all_ranks_save_every_rank_loads(master: SimulatedMaster, name: str) -> None:
    check_bytes(Deployed(SHAPES[name], master))


@pytest.mark.parametrize("name", SHAPES)
def test_without_any_one_ranks_object_the_hit_is_right(master: SimulatedMaster, name: str) -> None:
    check_lost_objects(Deployed(SHAPES[name], master))


@pytest.mark.parametrize("name", ["tp1-sparse", "pp2-cut-in-4", "pp1-cut-in-3", "tp4-heads4", "pcp2-interleave1"])
def test_c5_the_object_that_is_gone_is_stored_again(master: SimulatedMaster, name: str) -> None:
    check_gaps_are_filled(Deployed(SHAPES[name], master))


@pytest.mark.parametrize("name", SHAPES)
def test_writing_is_a_partition_also_after_a_hit_in_mid_prefix(master: SimulatedMaster, name: str) -> None:
    check_shared_writing(Deployed(SHAPES[name], master))


def test_every_replica_has_its_share_of_the_writing(master: SimulatedMaster) -> None:
    deployed = Deployed(SHAPES["tp8-sparse"], master)
    writes = deployed.save(deployed.prompt("shares", 64))
    assert min(len(keys) for keys in writes.values()) >= 2
    assert max(len(keys) for keys in writes.values()) <= 16


ROW = re.compile(r"^\| (?P<what>.+?) \| (?P<objects>[\d,]+) \|$", re.MULTILINE)
PER_MILLION_TOKENS = {
    "DeepSeek-V3.2 or V3 at any TP": Shape(SPARSE, 16),
    "the same with PP 2, or `prefill_pp_size` 2": Shape(SPARSE, 2, 2),
    "the same with PCP 2 or DCP 2 (logical blocks of 256 tokens)": Shape(SPARSE, 2, pcp=2),
    "Qwen3-32B (8 KV heads) at TP 8": Shape(HEADS[8], 8),
    "Qwen3-235B (4 KV heads) at TP 8": Shape(HEADS[4], 8),
}


@pytest.mark.parametrize("what", PER_MILLION_TOKENS)
def test_f2_a_block_is_so_many_objects_as_the_page_says(master: SimulatedMaster, what: str) -> None:
    """Whatever the number of layers and components; counted on few blocks, told for a million tokens."""
    told = {row["what"]: int(row["objects"].replace(",", "")) for row in ROW.finditer(KEYS_PAGE)}
    shape = PER_MILLION_TOKENS[what]
    deployed = Deployed(shape, master)
    deployed.save(deployed.prompt("few", 3))
    per_block, rest = divmod(len(deployed.objects()), 3)
    assert rest == 0
    assert set(told) == set(PER_MILLION_TOKENS)
    blocks = -(-1_000_000 // (128 * shape.pcp * shape.dcp))
    assert told[what] == per_block * blocks


@pytest.mark.parametrize("model", [MLA, SPARSE])
def test_latent_caches_stored_at_tp_8_are_those_stored_at_tp_1(model: str) -> None:
    """The very same objects: as many, under the same keys, with the same bytes."""
    stored = []
    for tp in (1, 8):
        with pool() as master:
            deployed = Deployed(Shape(model, tp, options=MTP), master)
            deployed.save(deployed.prompt("same", 16))
            stored.append(deployed.objects())
    assert len(stored[0]) == 16
    assert stored[0] == stored[1]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tp", range(1, 17))
def test_tensor_parallel_sizes_that_cannot_be_are_refused_in_words(tp: int, heads: int) -> None:
    """Sixteen sizes against four numbers of heads: what splits or repeats heads evenly works, the others say why."""
    if tp in {1: range(1, 17), 2: (1, *range(2, 17, 2)), 4: (1, 2, 4, 8, 12, 16), 8: (1, 2, 4, 8, 16)}[heads]:
        topology = Topology(heads, tp)
        held = Counter(h for r in topology.ranks() for h in range(*head_span(topology.heads(r))))
        assert held == dict.fromkeys(range(heads), max(1, tp // heads))
        return
    words = rf"tensor parallel size {tp} and {heads} KV heads do not divide.*divisor or a multiple of {heads}"
    with pytest.raises(TopologyError, match=words):
        Topology(heads, tp)


def head_span(heads: HeadRange) -> tuple[int, int]:
    return heads.first, heads.first + heads.count


@pytest.mark.parametrize("dcp", range(1, 9))
@pytest.mark.parametrize("heads", [1, 4])
def test_decode_context_sizes_that_cannot_be_are_refused_in_words(dcp: int, heads: int) -> None:
    copies = 8 // heads
    if copies % dcp == 0:
        assert {Topology(heads, 8, dcp_size=dcp).context(rank).size for rank in Topology(heads, 8).ranks()} == {dcp}
        return
    words = rf"context parallel size {dcp} does not divide the {copies} ranks .* choose a divisor of {copies}"
    with pytest.raises(TopologyError, match=words):
        Topology(heads, 8, dcp_size=dcp)


@pytest.mark.timeout(600)
def test_the_run_of_the_first_sparse_pool_byte_by_byte(master: SimulatedMaster) -> None:
    """At its real number of layers: sixteen ranks, eight of which hold the same half of every block's tokens."""
    deployed = Deployed(FIRST_SPARSE_RUN, master, staging_bytes=4 << 20)
    assert deployed.block_tokens == 256
    assert num_shards(FIRST_SPARSE_RUN) == 2
    prompt = deployed.prompt("the run", 3)
    assert_partition(deployed, deployed.save(prompt), range(3), prompt.hashes)
    assert_hits_end_at_lost_objects(deployed, prompt)
    for rank in deployed.ranks:
        loaded = deployed.load(prompt, rank)
        assert not loaded.failed
        assert not loaded.wrong, loaded.wrong[:4]


@pytest.mark.timeout(600)
def test_the_run_of_the_first_sparse_pool_in_the_engine() -> None:
    """The same ranks under the engine, as they were configured: no prefix caching, whole prompts, loads in the step."""
    outcome = run(
        Scenario(
            6339,
            "named",
            FIRST_SPARSE_RUN,
            Limits(num_blocks=14, max_batched_tokens=8192, caching=False),
            num_requests=8,
            mix=Mix(num_documents=1, document_tokens=768, longest_question=60, longest_answer=2, chats=0.0),
            arrival_s=1.0,
            settings={"load_async": False, "use_layerwise": False},
        )
    )
    assert outcome.violations == []
    assert outcome.num_missing == 0
    assert outcome.num_loads >= 16 * 2


UNDER_THE_ENGINE = (
    *("pp4-uneven-mtp-last", "pp2-pcp2-dcp2-tp4-mtp", "pcp8-dcp2-interleave16"),
    *("dcp8-interleave4", "dcp2-heads2-tp8", "tp16-heads8"),
)


@pytest.mark.parametrize("name", UNDER_THE_ENGINE)
def test_two_data_parallel_ranks_under_the_engine(name: str) -> None:
    """Each data parallel rank is an engine with a scheduler of its own; all have one pool."""
    shape = SHAPES[name]
    tokens = shape.block_sizes[0] * shape.pcp * shape.dcp
    outcome = run(
        Scenario(
            5,
            "named",
            shape,
            Limits(num_blocks=30, max_batched_tokens=4096, caching=False),
            num_engines=2,
            num_requests=16,
            mix=Mix(num_documents=1, document_tokens=3 * tokens, longest_question=tokens, longest_answer=4, chats=0.3),
            arrival_s=0.2,
        )
    )
    assert outcome.violations == []
    assert outcome.num_missing == 0
    assert outcome.num_loads > 0


# Mistakes: each must be found by the check that is for it.

right_saves = PoolWorker._shard_saves


def submit_with_one_ticket(self: Saver, saves: Sequence[ShardBlocks], event: Event) -> None:
    """A job that claims each block once."""
    ticket = self._fence.ticket({block_id for save in saves for block_id in save.block_ids})
    num_blocks = sum(len(save.block_ids) for save in saves)
    with self._lock:
        self._num_queued += num_blocks
    self._jobs.put(_Job(event, saves, [ticket] * len(saves), num_blocks))


MISTAKES: dict[str, tuple[type, str, Callable[..., Any], Callable[[Deployed], None], str]] = {
    "every rank writes every block": (
        Writer,
        "writes",
        lambda self, block_hash: True,
        check_shared_writing,
        "tp4-sparse",
    ),
    "copies under decode context parallelism count as others": (
        Topology,
        "writer",
        lambda self, rank: Writer(rank.tp % self.num_replicas, self.num_replicas),
        check_shared_writing,
        "dcp4-interleave1",
    ),
    "prefill and decode positions are swapped": (
        Topology,
        "context",
        lambda self, rank: ContextRange(rank.tp % self.dcp_size * self.pcp_size + rank.pcp, self.cp_size, 1),
        check_other_split,
        "pcp2-dcp4-interleave1",
    ),
    "ranks with other heads count as copies": (
        Topology,
        "heads",
        lambda self, rank: HeadRange(0, 1, self.num_kv_heads),
        check_bytes,
        "tp4-heads4",
    ),
    "ranks with other tokens count as copies": (
        Topology,
        "context",
        lambda self, rank: ContextRange(0, 1, 1),
        check_bytes,
        "pcp2-interleave1",
    ),
    "the lookup asks for the first rank's object alone": (
        ShardMap,
        "shards",
        lambda self, group: self._shards[group][:1],
        check_lost_objects,
        "tp4-heads4",
    ),
    "the last stage is not asked for": (
        ShardMap,
        "keys",
        lambda self, group, hashes, tag="": [s.key(h, tag) for h in hashes for s in self._shards[group][:-1] * 2],
        check_lost_objects,
        "pp2-mtp-last",
    ),
    "of several parts that a rank holds only the first is saved": (
        PoolWorker,
        "_shard_saves",
        lambda self, job: right_saves(self, job)[:1],
        check_shared_writing,
        "pp1-cut-in-3",
    ),
    "what one shard of a block need not read, no other reads": (
        Saver,
        "submit",
        submit_with_one_ticket,
        check_gaps_are_filled,
        "pp1-cut-in-3",
    ),
    "whoever holds a copy writes by its own count": (
        Writer,
        "writes",
        lambda self, block_hash: block_hash[0] % (self.count + self.index) == 0,
        check_shared_writing,
        "tp8-sparse",
    ),
}


@pytest.mark.kvpool_teeth("wrong topologies")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_is_found(master: SimulatedMaster, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    owner, name, wrong, check, shape = MISTAKES[mistake]
    check(Deployed(SHAPES[shape], master))
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, TopologyError)), pool("127.0.0.1:50052") as other:
        check(Deployed(SHAPES[shape], other))
