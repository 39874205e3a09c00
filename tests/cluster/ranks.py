"""The caches and groups of a scenario's shape."""

from __future__ import annotations

from dataclasses import replace

from kvpool_connector.contract.topology import LayerCuts, Topology
from kvpool_connector.contract.topology import Rank as Coordinates
from kvpool_connector.registration import GroupSpec
from kvpool_connector.tracker import GroupRule
from kvpool_simulator.device import MODELS, Caches, CacheSpec, allocate, families, hybrids, rank_spec
from kvpool_simulator.device.models import Gqa, head_range
from kvpool_simulator.engine import Group, RankMemory
from tests.cluster.scenario import HYBRID, MADE_HERE, STATES, Shape

HYBRID_HEADS, HYBRID_DIM, HYBRID_LAYERS = 2, 16, 4
STATE_LAYERS = 2


def topology_of(shape: Shape) -> Topology:
    """The parallel shape; a latent cache has one head."""
    if shape.model in MADE_HERE:
        heads = HYBRID_HEADS
    else:
        attention = MODELS[shape.model].attention
        heads = attention.num_kv_heads if isinstance(attention, Gqa) else 1
    return Topology(heads, shape.tp, shape.pp, shape.pcp, shape.dcp, shape.interleave, LayerCuts.of(shape.cuts))


def spec_of(shape: Shape, rank: Coordinates) -> CacheSpec:
    """What a rank registers."""
    if shape.model not in MADE_HERE:
        return rank_spec(
            shape.model,
            tp=shape.tp,
            tp_rank=rank.tp,
            pp=shape.pp,
            pp_rank=rank.pp,
            pp_partition=shape.stages,
            block_size=shape.block_sizes[0],
            **shape.options,
        )
    first, count = head_range(HYBRID_HEADS, shape.tp, rank.tp)
    if shape.model != HYBRID:
        conv, ssm = (replace(state, first_head=rank.tp) for state in hybrids.state_components((3, 8), (2, 4, 4)))
        return hybrids.attention_and_mamba(
            f"model.layers.{STATE_LAYERS}.self_attn.attn",
            [f"model.layers.{index}.linear_attn" for index in range(STATE_LAYERS)],
            shape.block_sizes[0],
            count,
            HYBRID_DIM,
            (conv, ssm),
            first_head=first,
        )
    layers = []
    for index in range(HYBRID_LAYERS):
        group = index % 2
        name = f"model.layers.{index}.self_attn.attn"
        layer = families.gqa(name, shape.block_sizes[group], count, HYBRID_DIM, first_head=first)
        layers.append(CacheSpec(tuple(replace(entry, group=group) for entry in layer.entries), layer.raw_tensors))
    return CacheSpec.join(layers)


def groups_of(shape: Shape) -> list[Group]:
    """The engine's groups, over all stages."""
    stages = [spec_of(shape, Coordinates(pp=pp)) for pp in range(shape.pp)]
    return [
        Group(
            tuple(entry.layer_name for spec in stages for entry in spec.entries if entry.group == number),
            size,
            shape.window if number else None,
            shape.pcp * shape.dcp,
            state=shape.model == STATES and number > 0,
        )
        for number, size in enumerate(shape.block_sizes)
    ]


def rule_of(group: Group) -> GroupRule:
    """What the connector is told of a group."""
    if group.state:
        return GroupRule(group.tokens, 1, state=True)
    return GroupRule(group.tokens, None if group.sliding_window is None else group.sliding_window - 1)


def memory_of(shape: Shape, topology: Topology, rank: Coordinates, num_blocks: int) -> RankMemory:
    """A rank's caches, poisoned, and where each token lies in them."""
    context = topology.context(rank)
    caches = allocate(spec_of(shape, rank), num_blocks)
    return RankMemory(caches, context.position, context.size, context.interleave)


def registered_groups(shape: Shape, caches: Caches) -> list[GroupSpec]:
    """What the engine tells the connector of its groups, as far as this rank has them."""
    kind = "attention" if shape.model in MADE_HERE or isinstance(MODELS[shape.model].attention, Gqa) else "latent"
    return [
        GroupSpec(
            tuple(entry.layer_name for entry in caches.spec.entries if entry.group == number),
            size,
            caches.num_blocks,
            kind="state" if group.state else kind,
            num_heads=shape.tp if group.state else None,
        )
        for number, (size, group) in enumerate(zip(shape.block_sizes, groups_of(shape), strict=True))
    ]
