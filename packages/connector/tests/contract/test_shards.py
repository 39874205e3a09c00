"""Shards: the keys of what ranks announce, and what is said of ranks that do not fit together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool_connector.contract.descriptor import ComponentContent, Descriptor, LayerContent, ModelIdentity
from kvpool_connector.contract.errors import TopologyError
from kvpool_connector.contract.keys import Key, parse_key, tag_of
from kvpool_connector.contract.shards import RankShards, Shard, ShardMap, with_prefill_ranks
from kvpool_connector.contract.topology import ContextRange, HeadRange, LayerCuts, Rank, Topology, Writer

FIRST, ALONE, WHOLE = Rank(), Writer(0, 1), ContextRange(0, 1, 1)


def descriptor(group: int, context: ContextRange = WHOLE) -> Descriptor:
    content = ComponentContent("kv", "bfloat16", (16, 1, 8), "NHD")
    return Descriptor(
        ModelIdentity("m"), group, 16, HeadRange(0, 1, 1), context, (LayerContent(str(group), (content,)),)
    )


def announced(*groups: int | None, rank: Rank = FIRST, epoch: int = 4, writer: Writer = ALONE) -> RankShards:
    descriptors = tuple(() if group is None else (descriptor(group),) for group in groups)
    return RankShards(rank, "ns", epoch, (writer,) * len(groups), descriptors)


def test_a_key_names_namespace_epoch_fingerprint_block_and_tag() -> None:
    (shard,) = announced(0).shards(0)
    assert shard == Shard("ns", 4, descriptor(0).fingerprint)
    assert parse_key(shard.key(b"\x01\x02", "0" * 16)) == Key("ns", 4, shard.fingerprint, b"\x01\x02", "0" * 16)
    assert parse_key(shard.key(b"\x01\x02")) == Key("ns", 4, shard.fingerprint, b"\x01\x02")
    assert parse_key(shard.descriptor_key()) == Key("ns", 4, shard.fingerprint)


def test_a_rank_without_layers_of_a_group_has_no_shard_of_it() -> None:
    assert announced(None, 1).shards(0) == []


def test_tags_are_part_of_the_format() -> None:
    """Written out: whoever routes requests makes them too."""
    assert tag_of() == tag_of(None, "") == ""
    assert tag_of(lora="a") == "1c26485fa6931297"
    assert tag_of(salt="a") == "ae14edec47555e1f"
    assert tag_of("a", "b") == "ed58660c3197742e"


def test_keys_without_a_tag_are_those_of_the_holders() -> None:
    shards = ShardMap(Topology(1), [announced(0, 1)])
    assert shards.num_groups == 2
    assert shards.keys(1, [b"h"]) == [announced(0, 1).shards(1)[0].key(b"h")]


def test_the_place_of_a_block_among_writers_is_in_its_last_eight_bytes() -> None:
    """The same on every machine and in every release: two ranks that disagree both write, or neither does."""
    block_hash = b"\xff" * 24 + (0x0102030405060708).to_bytes(8, "big")
    for count in (1, 2, 3, 5, 7, 16):
        assert [Writer(i, count).writes(block_hash) for i in range(count)].index(True) == 0x0102030405060708 % count


def test_ranks_too_many_or_too_few_are_refused() -> None:
    topology = Topology(1, 2)
    both = [announced(0, rank=rank, writer=topology.writer(rank)) for rank in topology.ranks()]
    ShardMap(topology, both)
    stranger = announced(0, rank=Rank(tp=5), writer=Writer(0, 1))
    with pytest.raises(TopologyError, match="announced 3 ranks"):
        ShardMap(topology, [*both, stranger])
    with pytest.raises(
        TopologyError, match=r"announced 2 ranks.*tp=1.*\. Every worker of the engine must run this conn"
    ):
        ShardMap(topology, [both[0], stranger])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            replace(announced(0, rank=Rank(tp=1)), namespace="other"),
            "namespace 'ns' but .* uses 'other'; give every worker the same",
        ),
        (announced(0, 1, rank=Rank(tp=1)), "has 1 KV cache groups but .* has 2; every worker must see the same"),
    ],
)
def test_ranks_that_disagree_are_named(other: RankShards, words: str) -> None:
    with pytest.raises(TopologyError, match=rf"Rank\(pp=0, pcp=0, tp=0\).*{words}"):
        ShardMap(Topology(1, 2), [announced(0), other])


FIRST_NAME, SECOND_NAME = "Rank(pp=0, pcp=0, tp=0)", "Rank(pp=0, pcp=0, tp=1)"
REMEDY = "Give every worker the same model, versions of vLLM and vLLM-Ascend, and configuration"


def layered(*names: str, **changes: object) -> Descriptor:
    """Layers 3 and 4 of two components each; `changes` are of layer 4's second component."""
    components = tuple(ComponentContent(name, "bfloat16", (16, 1, 8), "NHD") for name in names or ("k_nope", "k_pe"))
    odd = (*components[:1], replace(components[1], **changes), *components[2:])  # type: ignore[arg-type]
    return replace(descriptor(0), layers=(LayerContent("3", components), LayerContent("4", odd)))


LAYERED = layered()
DISAGREE: list[tuple[Descriptor | None, str]] = [
    (layered(dtype="int8"), ", layer '4', component 'k_pe': dtype is 'bfloat16' on the first and 'int8' on the second"),
    (
        layered(page_shape=(16, 1, 4)),
        ", layer '4', component 'k_pe': page_shape is (16, 1, 8) on the first and (16, 1, 4) on the second",
    ),
    (layered(order="NZ"), ", layer '4', component 'k_pe': order is 'NHD' on the first and 'NZ' on the second"),
    (
        layered("k_nope", "k_pe", "dsa_k"),
        ", layer '3': components is ['k_nope', 'k_pe'] on the first and ['k_nope', 'k_pe', 'dsa_k'] on the second",
    ),
    (
        replace(LAYERED, layers=LAYERED.layers[:1]),
        ": layers of its objects is [['3', '4']] on the first and [['3']] on the second",
    ),
    (
        replace(LAYERED, layers=(LAYERED.layers[0], replace(LAYERED.layers[1], label="mtp.0"))),
        ": layers of its objects is [['3', '4']] on the first and [['3', 'mtp.0']] on the second",
    ),
    (None, ": layers of its objects is [['3', '4']] on the first and [] on the second"),
    (
        replace(LAYERED, model=ModelIdentity("m", quantization="ascend")),
        ": model quantization is '' on the first and 'ascend' on the second",
    ),
    (replace(LAYERED, block_size=32), ": block size is 16 on the first and 32 on the second"),
    (replace(LAYERED, checksum="xxh3-64"), ": checksum is '' on the first and 'xxh3-64' on the second"),
    (
        replace(LAYERED, heads=HeadRange(0, 1, 2)),
        ": KV heads of the model is 1 on the first and 2 on the second",
    ),
    (
        replace(LAYERED, context=ContextRange(0, 2, 1)),
        ": context parallel size is 1 on the first and 2 on the second",
    ),
]


@pytest.mark.parametrize(("other", "difference"), DISAGREE)
def test_the_first_difference_between_two_ranks_is_told(other: Descriptor | None, difference: str) -> None:
    ranks = [
        RankShards(FIRST, "ns", 0, (Writer(0, 2),), ((LAYERED,),)),
        RankShards(Rank(tp=1), "ns", 0, (Writer(1, 2),), ((other,) if other else (),)),
    ]
    with pytest.raises(TopologyError) as refusal:
        ShardMap(Topology(1, 2), ranks)
    assert str(refusal.value) == f"{FIRST_NAME} and {SECOND_NAME} disagree about KV cache group 0{difference}. {REMEDY}"


def test_ranks_with_heads_of_their_own_that_disagree_are_told_too() -> None:
    """Each writes its own objects, so that nothing else would notice."""
    split = [replace(LAYERED, heads=HeadRange(i, 1, 2)) for i in range(2)]
    odd = replace(split[1], layers=layered(dtype="int8").layers)
    ShardMap(Topology(2, 2), [RankShards(Rank(tp=i), "ns", 0, (ALONE,), ((split[i],),)) for i in range(2)])
    with pytest.raises(TopologyError, match="layer '4', component 'k_pe': dtype is 'bfloat16' on the first and 'int8'"):
        ShardMap(
            Topology(2, 2), [RankShards(Rank(tp=i), "ns", 0, (ALONE,), ((d,),)) for i, d in enumerate([split[0], odd])]
        )


def test_stages_have_other_layers_of_the_same_model() -> None:
    topology = Topology(1, pp_size=2)
    first, second = (replace(LAYERED, layers=LAYERED.layers[i : i + 1]) for i in range(2))
    ShardMap(topology, [RankShards(Rank(pp=i), "ns", 0, (ALONE,), ((one,),)) for i, one in enumerate((first, second))])
    other = replace(second, block_size=32)
    with pytest.raises(TopologyError) as refusal:
        ShardMap(
            topology, [RankShards(Rank(pp=i), "ns", 0, (ALONE,), ((one,),)) for i, one in enumerate((first, other))]
        )
    assert str(refusal.value) == (
        f"{FIRST_NAME} and Rank(pp=1, pcp=0, tp=0) disagree about KV cache group 0: block size is 16 on the first and "
        f"32 on the second. {REMEDY}"
    )


def test_a_reset_between_the_starts_of_two_workers_is_no_disagreement() -> None:
    shards = ShardMap(Topology(1, 2), two_ranks(epochs=(4, 5)))
    assert shards.epoch == 5
    assert {parse_key(key).epoch for key in shards.keys(0, [b"h"])} == {5}
    shards.move(7)
    assert {parse_key(key).epoch for key in shards.keys(0, [b"h"])} == {7}


def two_ranks(epochs: tuple[int, int]) -> list[RankShards]:
    return [announced(0, rank=Rank(tp=tp), epoch=epoch, writer=Writer(tp, 2)) for tp, epoch in enumerate(epochs)]


def test_a_group_that_nobody_holds_is_refused() -> None:
    with pytest.raises(TopologyError, match="no worker holds a layer of KV cache group 1"):
        ShardMap(Topology(1), [announced(0, None)])


def test_writers_that_leave_a_gap_are_named_with_group_and_shard() -> None:
    with pytest.raises(TopologyError) as refusal:
        ShardMap(Topology(1, 2), [announced(0), announced(0, rank=Rank(tp=1))])
    said = str(refusal.value)
    assert f"KV cache group 0, shard {descriptor(0).fingerprint}" in said
    assert "writing as [0, 0], expected [0]" in said
    assert said.endswith("disagree about the parallel shape (or hold different content where they should not)")


def stage(pp: int, *layers_by_group: int) -> RankShards:
    """A pipeline stage with one layer of each group."""
    held = ((replace(descriptor(layer), group=group),) for group, layer in enumerate(layers_by_group))
    return RankShards(Rank(pp=pp), "ns", 4, (ALONE,) * len(layers_by_group), tuple(held))


@pytest.mark.parametrize(("sizes", "layers"), [((1, 2), "1 to the last"), ((1, 2, 3), "1 to 2")])
def test_c3_no_stage_ends_inside_a_part(sizes: tuple[int, ...], layers: str) -> None:
    topology = Topology(1, pp_size=2, cuts=LayerCuts.of(sizes))
    with pytest.raises(TopologyError) as refusal:
        ShardMap(topology, [stage(0, 1), stage(1, 2)])
    assert str(refusal.value) == (
        f"pipeline stages [0, 1] hold parts of one object: layers {layers}. Set prefill_pp_layer_partition, on all "
        "engines that share, to sizes that end wherever a stage of one of them ends"
    )


def test_c3_every_part_of_a_group_is_asked_for_and_no_other_groups() -> None:
    topology = Topology(1, pp_size=2, cuts=LayerCuts.of((2, 2)))
    stages = [stage(0, 0, 1), stage(1, 2, 3)]
    shards = ShardMap(topology, stages)
    for group in (0, 1):
        assert shards.keys(group, [b"h"]) == [held.shards(group)[0].key(b"h") for held in stages]


def test_derived_prefill_ranks_hold_other_tokens_of_the_same_groups() -> None:
    topology = Topology(1, pcp_size=3, cp_interleave=8)
    heard = [replace(announced(None, 1, rank=Rank(pcp=pcp)), epoch=pcp) for pcp in (1, 2)]
    ranks = {shards.rank.pcp: shards for shards in with_prefill_ranks(topology, heard)}
    assert sorted(ranks) == [0, 1, 2]
    assert [ranks[1], ranks[2]] == heard
    assert ranks[0].epoch == 1
    assert ranks[0].descriptors == ((), (descriptor(1, ContextRange(0, 3, 8)),))


def test_context_ranges_of_ranks() -> None:
    assert Topology(1, cp_interleave=64).context(Rank()) == ContextRange(0, 1, 1)
    topology = Topology(1, 2, pcp_size=2, dcp_size=2, cp_interleave=64)
    assert [topology.context(rank) for rank in topology.ranks()] == [ContextRange(i, 4, 64) for i in range(4)]
    assert Topology(4, 2).heads(Rank(tp=1)) == HeadRange(2, 2, 4)
    topology = Topology(1, pcp_size=2, cp_interleave=64)
    assert [topology.context(rank) for rank in topology.ranks()] == [ContextRange(i, 2, 64) for i in range(2)]
