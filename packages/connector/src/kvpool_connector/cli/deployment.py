"""Descriptors that belong together: the shards that one parallel shape of one model leaves in a pool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kvpool_connector.cli.inventory import ShardObjects
from kvpool_connector.contract.descriptor import Descriptor, ModelIdentity


@dataclass(frozen=True)
class Shape:
    """What the shards of one deployment have in common. Sizes in tokens, heads in KV heads."""

    namespace: str
    epoch: int
    model: ModelIdentity
    heads_per_rank: int
    num_heads: int
    context_size: int
    interleave: int


@dataclass
class Deployment:
    """The shards by which an engine of this shape would be answered."""

    shape: Shape
    shards: list[ShardObjects]

    @property
    def groups(self) -> list[int]:
        """KV cache groups of which something is known."""
        return sorted({_descriptor(objects).group for objects in self.shards})

    def missing(self) -> list[str]:
        """Parts of a block that no descriptor in the pool stands for, in words: ranks that never announced them."""
        absent = []
        for group in self.groups:
            found = [_descriptor(o) for o in self.shards if _descriptor(o).group == group]
            for layers in sorted({tuple(layer.label for layer in d.layers) for d in found}):
                parts = {
                    (d.heads.first, d.context.position) for d in found if tuple(x.label for x in d.layers) == layers
                }
                absent += [
                    f"group {group}, layers {layers[0]}..{layers[-1]}: heads from {first} of {self.shape.num_heads}, "
                    f"context part {position} of {self.shape.context_size}"
                    for first in range(0, self.shape.num_heads, max(1, self.shape.heads_per_rank))
                    for position in range(self.shape.context_size)
                    if (first, position) not in parts
                ]
        return absent


def deployments(shards: Iterable[ShardObjects]) -> list[Deployment]:
    """Shards with descriptors, sorted into deployments.

    Shards of one group with the same heads and tokens but overlapping layers are of different pipelines, so they are
    kept apart.
    """
    by_shape: dict[Shape, list[ShardObjects]] = defaultdict(list)
    for objects in shards:
        if objects.descriptor is not None:
            by_shape[_shape(objects)].append(objects)
    return [Deployment(shape, chain) for shape, members in by_shape.items() for chain in _chains(members)]


def _chains(members: list[ShardObjects]) -> list[list[ShardObjects]]:
    chains: list[list[ShardObjects]] = []
    for objects in members:
        for chain in chains:
            if not any(_rivals(objects, other) for other in chain):
                chain.append(objects)
                break
        else:
            chains.append([objects])
    return chains


def _rivals(one: ShardObjects, other: ShardObjects) -> bool:
    """True for shards that no engine has both of."""
    a, b = _descriptor(one), _descriptor(other)
    overlap = not {layer.label for layer in a.layers}.isdisjoint(layer.label for layer in b.layers)
    same_place = (a.heads, a.context) == (b.heads, b.context)
    same_kind = (a.layers, a.block_size) == (b.layers, b.block_size)
    return a.group == b.group and overlap and (same_place or not same_kind)


def _shape(objects: ShardObjects) -> Shape:
    d = _descriptor(objects)
    return Shape(
        objects.shard.namespace,
        objects.shard.epoch,
        d.model,
        d.heads.count,
        d.heads.total,
        d.context.size,
        d.context.interleave,
    )


def _descriptor(objects: ShardObjects) -> Descriptor:
    assert objects.descriptor is not None
    return objects.descriptor
