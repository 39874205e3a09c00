"""Which bytes of an object belong to which layers, and which of the engine's hooks speaks for them.

The engine calls a hook before and after a layer's attention, by the name of the layer's cache entry. An indexer that
registers an entry of its own has no hooks that could be relied on: it runs somewhere in its layer. So it is waited for
one layer earlier, and saved one layer later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvpool_connector.contract.errors import LayoutError
from kvpool_connector.contract.layout import Layer, ShardLayout
from kvpool_connector.layer_cost import best_num_ranges
from kvpool_connector.registration import is_indexer


@dataclass(frozen=True)
class LayerRange:
    """Consecutive layers of one of the rank's shards that are moved together: one run of bytes of each object."""

    shard: int
    """Index among the shards that this rank holds."""
    index: int
    layout: ShardLayout
    """These layers alone."""
    offset: int
    """Where they start in the object, in bytes."""
    hooks: frozenset[str]
    """Cache entries whose hooks speak for the layers: each must be called in every step."""
    ready: frozenset[str]
    """Cache entries whose save hook must have been called before the layers may be saved."""
    after_step: bool
    """True where no hook is enough: none speaks for a layer or follows it, or it is computed several times (MTP)."""


class LayerPlan:
    """The ranges of all shards of a rank, and the hooks they hang on."""

    def __init__(
        self,
        layouts: Sequence[ShardLayout],
        layers_per_transfer: int | None = None,
        groups_without_hooks: Collection[int] = (),
    ) -> None:
        """`layers_per_transfer`: None for as many as `kvpool_connector.layer_cost.best_num_ranges` says.

        `groups_without_hooks`: KV cache groups whose layers call none (states), so that they go when the step ends.
        """
        self._hook_of_label = _hooks([layout for layout in layouts if layout.group not in groups_without_hooks])
        self._before, self._after = self._neighbours(layouts)
        self.ranges: tuple[tuple[LayerRange, ...], ...] = tuple(
            self._ranges(shard, layout, layers_per_transfer) for shard, layout in enumerate(layouts)
        )
        self.needed: Mapping[str, frozenset[tuple[int, int]]] = self._needed()
        """By hook, `(shard, range index)` of what must have landed when its wait returns; "" is the step's start."""
        self.repeating = frozenset(hook for label, hook in self._hook_of_label.items() if label.startswith("mtp."))
        """Hooks that may be called several times a step: a layer of multi-token prediction is computed once a token."""
        self.due: Mapping[str, tuple[LayerRange, ...]] = self._due()
        """By hook, ranges that a save hook can complete."""

    def hooks(self, shard: int) -> frozenset[str]:
        """Hooks that must be called in every step for `shard`."""
        return frozenset(hook for piece in self.ranges[shard] for hook in piece.hooks)

    def _ranges(self, shard: int, layout: ShardLayout, layers_per_transfer: int | None) -> tuple[LayerRange, ...]:
        count = layers_per_transfer or -(-len(layout.layers) // best_num_ranges(layout.object_bytes))
        ranges: list[LayerRange] = []
        offset = 0
        for start in range(0, len(layout.layers), count):
            layers = layout.layers[start : start + count]
            part = ShardLayout(layout.group, layout.block_size, layout.num_blocks, layers, layout.regions)
            hooks = [self._hook_of_label.get(layer.label) for layer in layers]
            ready = [*hooks, *(self._after.get(layer.label) for layer in layers if _has_indexer(layer))]
            ranges.append(
                LayerRange(
                    shard,
                    len(ranges),
                    part,
                    offset,
                    frozenset(hook for hook in hooks if hook),
                    frozenset(hook for hook in ready if hook),
                    None in ready or any(layer.label.startswith("mtp.") for layer in layers),
                )
            )
            offset += part.object_bytes
        return tuple(ranges)

    def _neighbours(self, layouts: Sequence[ShardLayout]) -> tuple[dict[str, str], dict[str, str]]:
        """By layer label, the hook before it ("" for the first) and the hook after it (none for the last)."""
        labels = sorted({layer.label for layout in layouts for layer in layout.layers}, key=_order)
        before: dict[str, str] = {}
        after: dict[str, str] = {}
        last = ""
        for label in labels:
            before[label] = last
            last = self._hook_of_label.get(label) or last
        following = None
        for label in reversed(labels):
            if following:
                after[label] = following
            following = self._hook_of_label.get(label) or following
        return before, after

    def _needed(self) -> Mapping[str, frozenset[tuple[int, int]]]:
        needed: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
        for pieces in self.ranges:
            for piece in pieces:
                for layer in piece.layout.layers:
                    place = (piece.shard, piece.index)
                    needed[self._hook_of_label.get(layer.label) or self._before[layer.label]].add(place)
                    if _has_indexer(layer):
                        # It may read in front of its layer's wait, but not in front of the one before.
                        needed[self._before[layer.label]].add(place)
        return {hook: frozenset(places) for hook, places in needed.items()}

    def _due(self) -> Mapping[str, tuple[LayerRange, ...]]:
        due: defaultdict[str, list[LayerRange]] = defaultdict(list)
        for pieces in self.ranges:
            for piece in pieces:
                for hook in piece.ready:
                    due[hook].append(piece)
        return {hook: tuple(pieces) for hook, pieces in due.items()}


def _hooks(layouts: Sequence[ShardLayout]) -> dict[str, str]:
    """By layer label the one entry whose hooks speak for the layer, whatever group it is in."""
    hooks: dict[str, str] = {}
    for layout in layouts:
        for layer in layout.layers:
            own = _own_hook(layer)
            if own and hooks.setdefault(layer.label, own) != own:
                raise LayoutError(
                    f"layer {layer.label}: its cache entries {hooks[layer.label]!r} and {own!r} are in different KV "
                    "cache groups, and which hook speaks for them is not known; set use_layerwise to false"
                )
    return hooks


def _own_hook(layer: Layer) -> str | None:
    """The first entry with hooks. Later ones share the first one's tensors, which the first one's attention fills."""
    return next((name for name in layer.layer_names if not is_indexer(name)), None)


def _has_indexer(layer: Layer) -> bool:
    return any(map(is_indexer, layer.layer_names))


def _order(label: str) -> tuple[int, int, str]:
    if label.isdigit():
        return (0, int(label), "")
    kind, _, index = label.partition(".")
    return (1, int(index), "") if kind == "mtp" and index.isdigit() else (2, 0, label)
