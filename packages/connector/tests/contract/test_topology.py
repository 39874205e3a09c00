"""From ranks to content: every topology, by counting."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict

import pytest

from kvpool_connector.contract.descriptor import ComponentContent, Descriptor, LayerContent, ModelIdentity
from kvpool_connector.contract.errors import TopologyError
from kvpool_connector.contract.shards import RankShards, ShardMap, with_prefill_ranks
from kvpool_connector.contract.topology import HeadSplit, LayerCuts, Rank, Topology, even_sizes

MODEL = ModelIdentity("m")
HASHES = [hashlib.sha256(bytes([i])).digest() for i in range(64)]


def topologies() -> list[Topology]:
    """All that vLLM accepts of TP x KV heads x DCP x PCP x PP."""
    found = []
    for tp in (1, 2, 4, 8, 16):
        for heads in (1, 2, 4, 8):
            for dcp in (1, 2, 4, 8):
                for pcp in (1, 2):
                    for pp in (1, 2, 3):
                        try:
                            found.append(Topology(heads, tp, pp, pcp, dcp, cp_interleave=16))
                        except TopologyError:
                            continue
    return found


def announce(topology: Topology, rank: Rank, namespace: str = "n") -> RankShards:
    """What a worker of a two-layers-a-stage model announces."""
    heads = topology.heads(rank)
    content = ComponentContent("kv", "bfloat16", (16, heads.count, 8), "NHD")
    layers = tuple(LayerContent(str(2 * rank.pp + i), (content,)) for i in range(2))
    descriptor = Descriptor(MODEL, 0, 16, heads, topology.context(rank), layers)
    return RankShards(rank, namespace, 0, (topology.writer(rank),), ((descriptor,),))


@pytest.mark.parametrize("topology", topologies(), ids=str)
def test_b8_f5_every_part_is_held_and_written_exactly_once(topology: Topology) -> None:
    holders: dict[tuple[int, int, int], list[Rank]] = defaultdict(list)
    for rank in topology.ranks():
        heads, context = topology.heads(rank), topology.context(rank)
        assert 0 <= context.position < context.size == topology.cp_size
        for head in range(heads.first, heads.first + heads.count):
            holders[rank.pp, head, context.position].append(rank)
    assert set(holders) == {
        (pp, head, position)
        for pp in range(topology.pp_size)
        for head in range(topology.num_kv_heads)
        for position in range(topology.cp_size)
    }
    for ranks in holders.values():
        for block_hash in HASHES:
            assert sum(topology.writer(rank).writes(block_hash) for rank in ranks) == 1


@pytest.mark.parametrize("topology", topologies(), ids=str)
def test_b1_b12_keys_looked_up_are_the_keys_of_all_ranks(topology: Topology) -> None:
    announced = [announce(topology, rank) for rank in topology.ranks()]
    shards = ShardMap(topology, announced)
    asked = shards.keys(0, [b"hash"], "0123456789abcdef")
    used = {shard.key(b"hash", "0123456789abcdef") for rank in announced for shard in rank.shards(0)}
    assert set(asked) == used
    assert len(asked) == len(used)
    heads = min(topology.num_kv_heads, topology.tp_size)
    assert len(asked) == topology.pp_size * topology.cp_size * heads


def test_f5_latent_caches_are_one_shard_at_every_tensor_parallel_size() -> None:
    keys = set()
    for tp in (1, 2, 4, 8, 16):
        topology = Topology(1, tp)
        keys.add(tuple(ShardMap(topology, [announce(topology, rank) for rank in topology.ranks()]).keys(0, [b"h"])))
    assert len(keys) == 1


def test_writing_is_shared_evenly() -> None:
    topology = Topology(1, 8)
    shares = Counter(rank for rank in topology.ranks() for h in HASHES if topology.writer(rank).writes(h))
    assert set(shares) == set(topology.ranks())
    assert max(shares.values()) <= 3 * len(HASHES) // 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_kv_heads": 8, "tp_size": 3}, "do not divide"),
        ({"num_kv_heads": 3, "tp_size": 8}, "do not divide"),
        ({"num_kv_heads": 8, "tp_size": 8, "dcp_size": 2}, "choose a divisor of 1"),
        ({"num_kv_heads": 1, "tp_size": 4, "dcp_size": 3}, "choose a divisor of 4"),
        ({"num_kv_heads": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_split_is_refused_in_words(arguments: dict[str, int], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        Topology(**arguments)


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "split", "expected"),
    [
        (8, 2, "rank", 4),
        (8, 16, "rank", 1),
        (8, 2, "head", 1),
        (8, 4, (4, 8), 1),
        (8, 2, (2, 4), 2),
        (8, 2, (2,), 4),
        (12, 4, (2, 3, 4), 1),
        (12, 2, (2, 6), 2),
        (4, 2, (2, 8), 1),
        (1, 8, (2, 8), 1),
    ],
)
def test_heads_of_a_shard(num_kv_heads: int, tp_size: int, split: HeadSplit, expected: int) -> None:
    topology = Topology(num_kv_heads, tp_size)
    assert topology.heads_per_shard(split) == expected
    for rank in topology.ranks():
        held = topology.heads(rank)
        parts = topology.shard_heads(rank, expected)
        assert [part.first for part in parts] == list(range(held.first, held.first + held.count, expected))
        assert {(part.count, part.total) for part in parts} == {(expected, num_kv_heads)}


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ((4, 8), r"kv_head_split = \[4, 8\] does not name this engine's tensor parallel size 2; give every engine"),
        ((2, 3), r"tensor parallel size 3 and 8 KV heads do not divide one another; name divisors or multiples of 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_words(split: HeadSplit, words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        Topology(8, 2).heads_per_shard(split)


def test_b13_ranks_of_two_namespaces_are_refused() -> None:
    topology = Topology(1, 2)
    with pytest.raises(TopologyError, match="namespace"):
        ShardMap(topology, [announce(topology, Rank(tp=0), "a"), announce(topology, Rank(tp=1), "b")])


def test_a_missing_rank_is_refused() -> None:
    topology = Topology(1, 2)
    with pytest.raises(TopologyError, match=r"missing: \[Rank\(pp=0, pcp=0, tp=1\)\]"):
        ShardMap(topology, [announce(topology, Rank(tp=0))])


def test_a_shard_without_a_writer_is_refused() -> None:
    topology = Topology(1, 2)
    wrong = announce(Topology(2, 2), Rank(tp=1))
    with pytest.raises(TopologyError, match="KV heads of the model is 1 on the first and 2 on the second"):
        ShardMap(topology, [announce(topology, Rank(tp=0)), wrong])


def test_c3_layers_lie_in_parts_by_their_index_and_mtp_in_the_last() -> None:
    cuts = LayerCuts.of((2, 1, 3))
    assert (cuts.starts, cuts.num_parts) == ((0, 2, 3), 3)
    assert [cuts.part(label) for label in ("0", "1", "2", "3", "5", "mtp.0")] == [0, 0, 1, 2, 2, 2]
    assert [LayerCuts().part(label) for label in ("0", "60", "mtp.0")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"), [(61, 1, (61,)), (61, 2, (31, 30)), (61, 4, (15, 15, 16, 15)), (5, 4, (1, 1, 2, 1))]
)
def test_c3_the_even_partition_is_the_engines(layers: int, stages: int, sizes: tuple[int, ...]) -> None:
    assert even_sizes(layers, stages) == sizes


def test_prefill_ranks_that_the_handshake_cannot_name_are_derived() -> None:
    topology = Topology(1, 2, pp_size=2, pcp_size=2)
    heard = [announce(topology, rank) for rank in topology.ranks() if rank.pcp == 1]
    full = ShardMap(topology, [announce(topology, rank) for rank in topology.ranks()])
    derived = ShardMap(topology, with_prefill_ranks(topology, heard))
    assert set(derived.keys(0, [b"h"])) == set(full.keys(0, [b"h"]))


def test_b6_whatever_decides_the_bytes_decides_the_fingerprint() -> None:
    topology = Topology(1)
    rank = Rank()
    base = announce(topology, rank).descriptors[0][0]
    content = base.layers[0].components[0]
    from dataclasses import replace

    variants = [
        replace(base, block_size=32),
        replace(base, group=1),
        replace(base, format_version=2),
        replace(base, model=replace(MODEL, name="n")),
        replace(base, model=replace(MODEL, revision="r")),
        replace(base, model=replace(MODEL, cache_dtype="fp8")),
        replace(base, model=replace(MODEL, compute_dtype="float16")),
        replace(base, model=replace(MODEL, quantization="w8a8")),
        replace(base, heads=replace(base.heads, total=2)),
        replace(base, context=replace(base.context, size=2)),
        replace(base, context=replace(base.context, interleave=2)),
        replace(base, layers=base.layers[:1]),
        *(
            replace(base, layers=(LayerContent("0", (replace(content, **change),)), base.layers[1]))  # type: ignore[arg-type]
            for change in (
                {"dtype": "int8"},
                {"page_shape": (16, 1, 9)},
                {"order": "HND"},
                {"order": "NZ"},
                {"name": "k"},
            )
        ),
    ]
    fingerprints = {base.fingerprint, *(variant.fingerprint for variant in variants)}
    assert len(fingerprints) == len(variants) + 1
