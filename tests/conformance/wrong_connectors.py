"""Mistakes planted into the connector, one at a time, and the test of the suite that must catch each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvpool_connector import head_split, host, mooncake, planner, registration, saver, transfer, worker
from kvpool_connector.contract import descriptor, shards, topology
from kvpool_connector.contract.layout import Component, Layer, ShardLayout
from kvpool_connector.contract.status import Status

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class WrongConnector:
    """A mistake, how to plant it, and the test that must fail then."""

    mistake: str
    patch: Patch
    suite: str
    caught_by: str
    arguments: dict[str, Any]


WRONG_CONNECTORS: list[WrongConnector] = []


def plant(mistake: str, patch: Patch, caught_by: str, suite: str = "CacheRoundTrip", **arguments: Any) -> None:
    """Enter a mistake into the table."""
    WRONG_CONNECTORS.append(WrongConnector(mistake, patch, suite, caught_by, arguments))


# Layouts: what a rank believes of its memory. Both ways of transfer are built on them.


def layouts(change: Callable[[Layer], Layer | None]) -> Patch:
    """Every layer of every layout as `change` makes it; without the layers for which it makes None."""

    def read(kv_caches: Any, groups: Any) -> tuple[ShardLayout, ...]:
        right = registration.read_layouts(kv_caches, groups)
        return tuple(
            replace(layout, layers=tuple(new for layer in layout.layers if (new := change(layer)))) for layout in right
        )

    return lambda monkeypatch: monkeypatch.setattr(worker, "read_layouts", read)


def components(change: Callable[[Component, Layer, int], Component | None]) -> Patch:
    """Every component as `change` makes it; without those for which it makes None."""

    def layer_of(layer: Layer) -> Layer:
        made = (change(component, layer, i) for i, component in enumerate(layer.components))
        return replace(layer, components=tuple(component for component in made if component))

    return layouts(layer_of)


ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1}


def with_item_of(component: Component, other: Component) -> Component:
    """A component whose elements are taken to be as large as another's."""
    ratio = ITEM_BYTES[other.dtype] / ITEM_BYTES[component.dtype]
    size = max(1, int(component.piece_bytes * ratio))
    return replace(component, piece_bytes=size, block_stride=max(1, int(component.block_stride * ratio)))


def layout_mistake(mistake: str, layout: str, patch: Patch, transfer_mode: str = "direct") -> None:
    """A mistake that the round trip of one named layout catches."""
    plant(mistake, patch, "test_layout_in_one_process", layout=layout, transfer=transfer_mode)


# The three mistakes of the first sparse-attention pool (vLLM-Ascend #6339).
layout_mistake(
    "component 0's element size for all components",
    "sparse-bundled-c8",
    components(lambda c, layer, i: with_item_of(c, layer.components[0])),
)
layout_mistake(
    "the component's index left out of the base address",
    "sparse-bundled",
    components(lambda c, layer, i: replace(c, base_address=layer.components[0].base_address)),
)
layout_mistake("v left out", "gqa", components(lambda c, layer, i: None if c.name == "v" else c))

layout_mistake(
    "element size of the neighbour",
    "mla-two-dtypes",
    components(lambda c, layer, i: with_item_of(c, layer.components[(i + 1) % len(layer.components)])),
)
layout_mistake(
    "stride taken for bytes", "padded-block-stride", components(lambda c, *_: replace(c, piece_bytes=c.block_stride))
)
layout_mistake(
    "bytes taken for stride", "padded-block-stride", components(lambda c, *_: replace(c, block_stride=c.page_bytes))
)
layout_mistake(
    "off by one block", "mla", components(lambda c, *_: replace(c, base_address=c.base_address + c.block_stride))
)
layout_mistake("off by one byte", "mla", components(lambda c, *_: replace(c, base_address=c.base_address + 1)))
layout_mistake(
    "the indexer is not stored", "sparse-bundled", components(lambda c, *_: None if c.name == "dsa_k" else c)
)
layout_mistake(
    "the scales are not stored", "sparse-split-c8", components(lambda c, *_: None if "scale" in c.name else c)
)
layout_mistake("the rope part is not stored", "mla", components(lambda c, *_: None if c.name == "k_pe" else c))
layout_mistake("the last layer is not stored", "mla", layouts(lambda layer: None if layer.label == "1" else layer))
layout_mistake("the MTP layer is not stored", "mtp", layouts(lambda layer: None if "mtp" in layer.label else layer))
layout_mistake(
    "only the first kernel block is stored",
    "padded-kernel-blocks",
    components(lambda c, *_: replace(c, num_pieces=1)),
)
layout_mistake(
    "kernel blocks are taken to be dense",
    "padded-kernel-blocks",
    components(lambda c, *_: replace(c, num_pieces=1, piece_bytes=c.page_bytes)),
)
layout_mistake(
    "v's head size taken from k",
    "gqa-other-v-head-size",
    components(lambda c, layer, i: replace(c, piece_bytes=layer.components[0].piece_bytes)),
)
layout_mistake(
    "one layer fewer indexers than layers, counted from the front",
    "some-layers-without-indexer",
    components(lambda c, layer, i: None if c.name == "dsa_k" and layer.label == "2" else c),
)
layout_mistake(
    "half of a page",
    "gqa",
    components(lambda c, *_: replace(c, piece_bytes=c.piece_bytes // 2)),
)

# The planner, the copies, the transfer.


def attribute(owner: Any, name: str, value: Any) -> Patch:
    """Another value for a name."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


RIGHT_ADDRESSES = planner.Planner.addresses


RIGHT_SCATTER = host.HostCopier.scatter
RIGHT_GATHER = host.HostCopier.gather
RIGHT_STATUSES = transfer.statuses_of
RIGHT_LOAD_CHUNK = transfer.PackedTransfer._load_chunk

layout_mistake(
    "the addresses of the first block for all",
    "mla",
    attribute(planner.Planner, "addresses", lambda self, ids: [RIGHT_ADDRESSES(self, ids)[0]] * len(ids)),
)
layout_mistake(
    "addresses by position, not by block",
    "mla",
    attribute(planner.Planner, "addresses", lambda self, ids: RIGHT_ADDRESSES(self, range(len(ids)))),
)
layout_mistake(
    "addresses in the order of sorted blocks",
    "mla",
    attribute(planner.Planner, "addresses", lambda self, ids: RIGHT_ADDRESSES(self, sorted(ids))),
)
layout_mistake(
    "copies into sorted blocks",
    "mla",
    attribute(host.HostCopier, "scatter", lambda self, ids, address: RIGHT_SCATTER(self, sorted(ids), address)),
    "packed",
)
layout_mistake(
    "copies out of sorted blocks",
    "mla",
    attribute(host.HostCopier, "gather", lambda self, ids, address: RIGHT_GATHER(self, sorted(ids), address)),
    "packed",
)
layout_mistake(
    "the last block of a batch is not copied",
    "mla",
    attribute(host.HostCopier, "scatter", lambda self, ids, address: RIGHT_SCATTER(self, ids[:-1], address)),
    "packed",
)
layout_mistake(
    "float arithmetic on sizes",
    "mla",
    components(lambda c, *_: replace(c, piece_bytes=int(c.piece_bytes / 49 * 49))),
)


def miss_is_success(call: Any, keys: Sequence[str], *arguments: Any) -> list[Status]:
    return [
        Status.OK if status is Status.MISS and arguments else status
        for status in RIGHT_STATUSES(call, keys, *arguments)
    ]


plant(
    "None, or a miss, taken for success",
    attribute(transfer, "statuses_of", miss_is_success),
    "test_what_was_never_saved_is_a_miss",
)
plant(
    "failed blocks are not reported",
    attribute(worker.PoolWorker, "take_failed_blocks", lambda self: set()),
    "test_a_lost_block_is_reported_and_no_other",
    position=2,
)
plant(
    "a failure fails the blocks after it too",
    attribute(
        transfer.PackedTransfer,
        "_load_chunk",
        lambda self, keys, ids, hold, chunk: _spoil(RIGHT_LOAD_CHUNK(self, keys, ids, hold, chunk)),
    ),
    "test_a_lost_block_is_reported_and_no_other",
    position=2,
)
plant(
    "only a failure of the first block is reported",
    attribute(
        transfer.PackedTransfer,
        "_load_chunk",
        lambda self, *a: [s if i == 0 else Status.OK for i, s in enumerate(RIGHT_LOAD_CHUNK(self, *a))],
    ),
    "test_a_lost_block_is_reported_and_no_other",
    position=2,
)
plant(
    "what is there is not looked for, and a second save replaces it",
    lambda monkeypatch: _replacing(monkeypatch),
    "test_saving_again_changes_nothing",
)


def _spoil(statuses: list[Status]) -> list[Status]:
    bad = next((i for i, status in enumerate(statuses) if not status.ok), len(statuses))
    return statuses[:bad] + [Status.UNAVAILABLE] * (len(statuses) - bad)


def _replacing(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: mooncake.MooncakeStore, keys: Sequence[str], *arguments: Any) -> list[Status]:
        self.remove(keys, force=True)
        return right(self, keys, *arguments)

    right = mooncake.MooncakeStore.put
    monkeypatch.setattr(mooncake.MooncakeStore, "put", put)
    monkeypatch.setattr(transfer, "save_missing", lambda store, keys, ids, hold, put: put(keys, ids))


# Keys and ranks.

RIGHT_JSON = descriptor.Descriptor.to_json
RIGHT_KEYS = shards.ShardMap.keys


def without(**erased: Any) -> Patch:
    """Fingerprints that do not see some things: fields of the descriptor, or of its components with `c_`."""

    def to_json(self: descriptor.Descriptor) -> str:
        of_components = {name[2:]: value for name, value in erased.items() if name.startswith("c_")}
        blind = replace(
            self,
            layers=tuple(
                replace(layer, components=tuple(replace(c, **of_components) for c in layer.components))
                for layer in self.layers
            ),
        )
        return RIGHT_JSON(replace(blind, **{name: v for name, v in erased.items() if not name.startswith("c_")}))

    return attribute(descriptor.Descriptor, "to_json", to_json)


NO_HEADS = topology.HeadRange(0, 1, 1)


def isolation_mistake(mistake: str, patch: Patch, difference: str) -> None:
    """A mistake that lets two deployments meet."""
    plant(mistake, patch, "test_b6_deployments_that_differ_do_not_share", "Isolation", difference=difference)


isolation_mistake("keys without dtypes", without(c_dtype=""), "kv-dtype")
isolation_mistake("keys without block size", without(block_size=0, c_page_shape=()), "block-size")
isolation_mistake("keys without the shape of pages", without(c_page_shape=()), "head-dim")
isolation_mistake("keys without heads", without(heads=NO_HEADS, c_page_shape=()), "tp-size")
isolation_mistake("keys without layers", without(layers=()), "layer-count")
isolation_mistake("keys without the MTP layer", without(layers=()), "mtp")
isolation_mistake("keys without the model", without(model=descriptor.ModelIdentity("")), "model")
isolation_mistake(
    "keys without a namespace",
    attribute(shards.Shard, "keys", lambda self, hs, tag="": [f"{self.fingerprint}/{h.hex()}{tag}" for h in hs]),
    "namespace",
)
plant(
    "keys without the rank's own heads",
    without(heads=NO_HEADS),
    "test_every_rank_gets_its_own_heads",
    "Isolation",
    tp_size=4,
)
plant(
    "keys without quantisation",
    without(c_dtype="", c_page_shape=(), c_name="", layers=()),
    "test_a17_quantised_and_plain_indexers_do_not_share",
    "Isolation",
)
plant(
    "the lookup asks the first rank alone",
    attribute(shards.ShardMap, "keys", lambda self, *a: RIGHT_KEYS(self, *a)[:1]),
    "test_b1_a_hit_needs_every_rank",
    "Isolation",
    missing=1,
)
plant(
    "the lookup asks the last rank alone",
    attribute(shards.ShardMap, "keys", lambda self, *a: RIGHT_KEYS(self, *a)[-1:]),
    "test_b1_a_hit_needs_every_rank",
    "Isolation",
    missing=0,
)
SHARED = {"suite": "Isolation", "caught_by": "test_latent_caches_are_shared_between_tensor_parallel_sizes"}
plant(
    "every rank writes replicated blocks",
    attribute(topology.Writer, "writes", lambda self, block_hash: True),
    **SHARED,
    saved_at=8,
    loaded_at=1,
)
plant(
    "half of the ranks write nothing",
    attribute(topology.Writer, "writes", lambda self, h: h[-1] % self.count == self.index and self.index % 2 == 0),
    **SHARED,
    saved_at=8,
    loaded_at=1,
)
plant(
    "each rank chooses what it writes by a rule of its own",
    attribute(topology.Writer, "writes", lambda self, h: (h[-1] * (self.index + 1)) % self.count == self.index),
    **SHARED,
    saved_at=8,
    loaded_at=1,
)
plant(
    "replicated heads keyed by rank",
    attribute(topology.Topology, "heads", lambda self, rank: topology.HeadRange(rank.tp, 1, self.tp_size)),
    **SHARED,
    saved_at=1,
    loaded_at=8,
)
layout_mistake(
    "keys without the block's hash",
    "mla",
    attribute(
        shards.Shard, "keys", lambda self, hs, tag="": [f"{self.namespace}/{self.fingerprint}/{tag}" for _ in hs]
    ),
)

# Rows with copies, several groups, or another byte order.

layout_mistake(
    "the copies of an indexer taken for blocks of their own",
    "replicated-indexer",
    attribute(registration, "_with_copies", lambda entries, group: entries),
)
layout_mistake(
    "a view that covers others moved again",
    "deepseek-v4-a5",
    attribute(registration, "_without_whole", lambda views: views),
)
layout_mistake(
    "groups in the same memory register it twice",
    "attention-and-mamba",
    attribute(worker, "merged", lambda regions: list(regions)),
)
plant(
    "the byte order left out of the fingerprint",
    components(lambda component, layer, index: replace(component, order="NHD")),
    "test_byte_orders_do_not_share",
    "Isolation",
    family="mla",
)

# Heads stored by themselves.

RIGHT_PART = head_split._part
RIGHT_SHARD_HEADS = topology.Topology.shard_heads
RIGHT_LOADS = worker.PoolWorker._shard_loads
RIGHT_SUBMIT = saver.Saver.submit


def part(change: Callable[..., Component]) -> Patch:
    """Every shard's part of a component as `change` makes it of the right one and of what it was made from."""

    def made(layer: Layer, whole: Component, first: int, count: int, num_heads: int) -> Component:
        return change(RIGHT_PART(layer, whole, first, count, num_heads), whole, first)

    return attribute(head_split, "_part", made)


def heads_mistake(mistake: str, patch: Patch, saved_at: int, loaded_at: int) -> None:
    """A mistake that engines of two tensor parallel sizes catch."""
    caught_by = "test_heads_are_shared_between_tensor_parallel_sizes"
    plant(mistake, patch, caught_by, "Isolation", num_heads=8, saved_at=saved_at, loaded_at=loaded_at)


def _one_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one shard's save has let go of is withdrawn from the next shard's."""

    def submit(self: saver.Saver, saves: Sequence[saver.ShardBlocks], event: Any) -> None:
        with monkeypatch.context() as within:
            ticket = self._fence.ticket(block_id for save in saves for block_id in save.block_ids)
            within.setattr(self._fence, "ticket", lambda block_ids: ticket)
            RIGHT_SUBMIT(self, saves, event)

    monkeypatch.setattr(saver.Saver, "submit", submit)


heads_mistake(
    "the offset of a head forgotten",
    part(lambda right, whole, first: replace(right, base_address=whole.base_address)),
    saved_at=1,
    loaded_at=8,
)
heads_mistake(
    "heads counted in bytes",
    part(lambda right, whole, first: replace(right, base_address=whole.base_address + first)),
    saved_at=1,
    loaded_at=8,
)
heads_mistake(
    "a token's heads taken to follow the token before without the others",
    part(lambda right, whole, first: replace(right, piece_stride=right.piece_bytes)),
    saved_at=2,
    loaded_at=4,
)
heads_mistake(
    "shards of a rank swapped",
    attribute(topology.Topology, "shard_heads", lambda self, *a: RIGHT_SHARD_HEADS(self, *a)[::-1]),
    saved_at=2,
    loaded_at=8,
)
heads_mistake(
    "heads of a shard counted from the rank's first",
    attribute(
        topology.Topology,
        "shard_heads",
        lambda self, rank, *a: [replace(h, first=h.first % 4) for h in RIGHT_SHARD_HEADS(self, rank, *a)],
    ),
    saved_at=2,
    loaded_at=8,
)
heads_mistake("keys without the shard's heads", without(heads=NO_HEADS), saved_at=4, loaded_at=4)
heads_mistake(
    "one shard of a rank loaded",
    attribute(worker.PoolWorker, "_shard_loads", lambda self, job: RIGHT_LOADS(self, job)[:1]),
    saved_at=8,
    loaded_at=2,
)
plant(
    "the lookup asks for one shard a rank",
    attribute(shards.ShardMap, "keys", lambda self, *a: RIGHT_KEYS(self, *a)[::4]),
    "test_a_hit_needs_every_head",
    "Isolation",
    part=3,
)
plant(
    "shards of a block in one ticket of the fence",
    _one_ticket,
    "test_a_block_of_which_some_heads_are_there_is_completed",
    "Isolation",
    transfer="packed",
)

# The store edge.

plant(
    "a key named twice in one read goes to the store in one call",
    attribute(mooncake.MooncakeStore, "_batches", lambda self, keys, sizes: [slice(0, len(keys))]),
    "test_a_key_named_twice_fills_both_destinations",
    "StoreConformance",
)
plant(
    "any size taken for the right one",
    lambda monkeypatch: _any_size(monkeypatch),
    "test_another_size_is_never_ok",
    "StoreConformance",
    asked=99,
)


def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_read_at", lambda expected, answer, i: Status.OK if answer != -704 else Status.MISS)


plant(
    "the index of a missing key is left out of the answers",
    attribute(mooncake, "_per_key", lambda answers, keys, of: [of(a, i) for i, a in enumerate(answers) if a != -704]),
    "test_missing_objects",
    "StoreConformance",
)
plant(
    "one status for a whole batch",
    attribute(mooncake, "_per_key", lambda answers, keys, of: [of(answers[0], 0)] * len(keys) if keys else []),
    "test_batches_answer_key_by_key",
    "StoreConformance",
)
