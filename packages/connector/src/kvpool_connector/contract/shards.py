"""From ranks to keys: the one function that lookup, save, load and events use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvpool_connector.contract.descriptor import Descriptor, LayerContent
from kvpool_connector.contract.errors import TopologyError
from kvpool_connector.contract.keys import Key, object_keys, scope_of
from kvpool_connector.contract.topology import LayerCuts, Rank, Topology, Writer


@dataclass(frozen=True)
class Shard:
    """What one object holds of a block: content (by fingerprint) under a namespace and an epoch."""

    namespace: str
    epoch: int
    fingerprint: str

    @cached_property
    def scope(self) -> str:
        """What the keys of this shard's objects begin with."""
        return scope_of(self.namespace, self.epoch, self.fingerprint)

    def key(self, block_hash: bytes, tag: str = "") -> str:
        """Key of the object that holds this shard of the block."""
        return self.keys([block_hash], tag)[0]

    def keys(self, block_hashes: Iterable[bytes], tag: str) -> list[str]:
        """Keys of the objects that hold this shard of the blocks."""
        return object_keys([self.scope], block_hashes, tag)

    def descriptor_key(self) -> str:
        """Key under which the pool keeps the descriptor that the fingerprint stands for."""
        return str(Key(self.namespace, self.epoch, self.fingerprint))


@dataclass(frozen=True)
class RankShards:
    """What one worker announces at start: its shards of each group, none where it holds no layer of the group."""

    rank: Rank
    namespace: str
    epoch: int
    """The newest that this worker found at start; a reset may come between one worker's start and another's."""
    writers: tuple[Writer, ...]
    """By group, this rank's place among those that hold the same."""
    descriptors: tuple[tuple[Descriptor, ...], ...]
    """By group; several of a group where objects are cut along the layers, or heads split, finer than ranks."""

    def shards(self, group: int) -> list[Shard]:
        """This rank's shards of `group`, in the order of `descriptors`."""
        return [Shard(self.namespace, self.epoch, one.fingerprint) for one in self.descriptors[group]]


def with_prefill_ranks(topology: Topology, announced: Iterable[RankShards]) -> list[RankShards]:
    """`announced`, and the prefill-context-parallel ranks that vLLM's handshake cannot name.

    vLLM (0.32) keys the handshake by pipeline and tensor rank, so of ranks that differ in `pcp` alone one is heard.
    Such ranks hold the same layers and heads of other tokens: what they hold follows from the one that was heard.
    """
    ranks = list(announced)
    known = {shards.rank for shards in ranks}
    derived: dict[Rank, RankShards] = {}
    for shards in ranks:
        for pcp in range(topology.pcp_size):
            rank = replace(shards.rank, pcp=pcp)
            if rank not in known and rank not in derived:
                context = topology.context(rank)
                descriptors = tuple(
                    tuple(replace(one, context=context) for one in group) for group in shards.descriptors
                )
                derived[rank] = replace(shards, rank=rank, descriptors=descriptors)
    return [*ranks, *derived.values()]


class ShardMap:
    """All ranks' shards: a block of a group is in the pool when every shard of the group is."""

    def __init__(self, topology: Topology, ranks: Iterable[RankShards]) -> None:
        """Check that the ranks agree and that every shard is written by somebody.

        Raises `TopologyError` naming the ranks at fault, and the first thing in which they differ.
        """
        by_rank = {shards.rank: shards for shards in ranks}
        missing = [rank for rank in topology.ranks() if rank not in by_rank]
        if missing or len(by_rank) != topology.pp_size * topology.pcp_size * topology.tp_size:
            raise TopologyError(
                f"the workers announced {len(by_rank)} ranks ({sorted(by_rank)}); missing: {missing}. "
                "Every worker of the engine must run this connector with the same configuration"
            )
        self._check_agreement(by_rank)
        self._check_layouts(by_rank)
        self.namespace = next(iter(by_rank.values())).namespace
        self.epoch = max(shards.epoch for shards in by_rank.values())
        self._shards: list[list[Shard]] = []
        num_groups = len(next(iter(by_rank.values())).descriptors)
        for group in range(num_groups):
            holders: dict[Shard, list[RankShards]] = defaultdict(list)
            stages: dict[int, set[int]] = defaultdict(set)
            for shards in by_rank.values():
                for shard, descriptor in zip(shards.shards(group), shards.descriptors[group], strict=True):
                    holders[replace(shard, epoch=self.epoch)].append(shards)
                    stages[topology.cuts.part(descriptor.layers[0].label)].add(shards.rank.pp)
            self._check_stages(topology.cuts, stages)
            self._check_writers(group, holders)
            self._shards.append(list(holders))

    def move(self, epoch: int) -> None:
        """From now on the shards of another epoch."""
        self.epoch = epoch
        self._shards = [[replace(shard, epoch=epoch) for shard in shards] for shards in self._shards]

    @property
    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self._shards)

    def shards(self, group: int) -> list[Shard]:
        """The distinct shards that together hold `group`."""
        return self._shards[group]

    def keys(self, group: int, block_hashes: Sequence[bytes], tag: str = "") -> list[str]:
        """Keys of all objects that hold the blocks, block by block: the very keys that the holders save and load."""
        return object_keys([shard.scope for shard in self._shards[group]], block_hashes, tag)

    @staticmethod
    def _check_agreement(by_rank: dict[Rank, RankShards]) -> None:
        first = next(iter(by_rank.values()))
        for other in by_rank.values():
            if other.namespace != first.namespace:
                raise TopologyError(
                    f"{first.rank} uses namespace {first.namespace!r} but {other.rank} uses {other.namespace!r}; "
                    "give every worker the same configuration"
                )
            if len(other.descriptors) != len(first.descriptors):
                raise TopologyError(
                    f"{first.rank} has {len(first.descriptors)} KV cache groups but {other.rank} has "
                    f"{len(other.descriptors)}; every worker must see the same KV cache groups"
                )

    @staticmethod
    def _check_layouts(by_rank: dict[Rank, RankShards]) -> None:
        """Ranks of one stage hold the same layers, laid out alike; all ranks hold the same model's, cut alike."""
        of_stage: dict[tuple[int, int], RankShards] = {}
        of_group: dict[int, RankShards] = {}
        for other in by_rank.values():
            for group, held in enumerate(other.descriptors):
                one = of_stage.setdefault((other.rank.pp, group), other)
                difference = _difference(one.descriptors[group], held)
                if held and not difference:
                    one = of_group.setdefault(group, other)
                    difference = _unlike(_shared_fields(one.descriptors[group][0]), _shared_fields(held[0]))
                if difference:
                    raise TopologyError(
                        f"{one.rank} and {other.rank} disagree about KV cache group {group}{difference}. Give every "
                        "worker the same model, versions of vLLM and vLLM-Ascend, and configuration"
                    )

    @staticmethod
    def _check_stages(cuts: LayerCuts, stages: Mapping[int, set[int]]) -> None:
        """`stages`: by part, those that hold any of it. An object is written whole, so no stage may end inside one."""
        for part, holders in sorted(stages.items()):
            if cuts.starts and len(holders) > 1:
                end = cuts.starts[part + 1] - 1 if part + 1 < len(cuts.starts) else "the last"
                raise TopologyError(
                    f"pipeline stages {sorted(holders)} hold parts of one object: layers {cuts.starts[part]} to {end}. "
                    "Set prefill_pp_layer_partition, on all engines that share, to sizes that end wherever a stage of "
                    "one of them ends"
                )

    @staticmethod
    def _check_writers(group: int, holders: dict[Shard, list[RankShards]]) -> None:
        if not holders:
            raise TopologyError(f"no worker holds a layer of KV cache group {group}")
        for shard, ranks in holders.items():
            indices = sorted(shards.writers[group].index for shards in ranks)
            expected = list(range(ranks[0].writers[group].count))
            if indices != expected:
                raise TopologyError(
                    f"KV cache group {group}, shard {shard.fingerprint}: ranks {sorted(s.rank for s in ranks)} share "
                    f"its writing as {indices}, expected {expected}. The ranks hold the same "
                    "content but disagree about the parallel shape (or hold different content where they should not)"
                )


def _difference(first: Sequence[Descriptor], other: Sequence[Descriptor]) -> str:
    """The first thing in which two ranks of one stage differ and must not, in words; empty where they agree.

    Which heads and which tokens they hold may differ.
    """
    for one, two in zip(first, other, strict=False):
        if said := _unlike(_shared_fields(one), _shared_fields(two)):
            return said
        for layer, its in zip(one.layers, two.layers, strict=False):
            if layer.label != its.label:
                break
            for component, beside in zip(layer.components, its.components, strict=False):
                if said := _unlike(vars(component), vars(beside)):
                    return f", layer {layer.label!r}, component {component.name!r}{said}"
            if said := _unlike({"components": _names(layer)}, {"components": _names(its)}):
                return f", layer {layer.label!r}{said}"
    return _unlike({"layers of its objects": _labels(first)}, {"layers of its objects": _labels(other)})


def _names(layer: LayerContent) -> list[str]:
    return [component.name for component in layer.components]


def _labels(held: Sequence[Descriptor]) -> list[list[str]]:
    return [[layer.label for layer in one.layers] for one in held]


def _shared_fields(descriptor: Descriptor) -> dict[str, object]:
    """What all ranks of an engine say alike of a group."""
    return {
        **{f"model {name}": value for name, value in vars(descriptor.model).items()},
        "format version": descriptor.format_version,
        "block size": descriptor.block_size,
        "KV heads of an object": descriptor.heads.count,
        "KV heads of the model": descriptor.heads.total,
        "context parallel size": descriptor.context.size,
        "context parallel interleave": descriptor.context.interleave,
        "checksum": descriptor.checksum,
    }


def _unlike(one: Mapping[str, object], other: Mapping[str, object]) -> str:
    """The first field whose values differ, and both."""
    for name, value in one.items():
        if value != other[name]:
            return f": {name} is {value!r} on the first and {other[name]!r} on the second"
    return ""
