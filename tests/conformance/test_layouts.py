"""The list of layouts: each row has a model in the simulator, golden vectors and round trips, and nothing else moves.

The round trips themselves are the suite's, over all named cases, on every target (`test_targets.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kvpool_conformance.cases import NAMED_CASES, CacheCase, Deployment
from kvpool_conformance.suites import CacheRoundTrip
from kvpool_conformance.suites.round_trip import WAYS
from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.registration import GroupSpec, read_layouts
from kvpool_simulator.device import GUARD, POISON, Caches, CacheSpec, allocate
from kvpool_simulator.device.caches import FRACTAL_COLUMNS, Range
from kvpool_simulator.device.spec import Order
from kvpool_simulator.layouts import NUMBERS, ROWS, Number, Row
from tests.conformance.vectors import PATH
from tests.targets.caches import cache_spec
from tests.targets.node import group_spec, topology_of
from tests.targets.simulator import simulator

GOLDEN = json.loads(PATH.read_text(encoding="utf-8"))["vectors"]

WANTED = {
    "GQA and MHA": "gqa",
    "V of another head size": "gqa-other-v-head-size",
    "MLA": "mla",
    "MLA with two dtypes": "mla-two-dtypes",
    "sparse, bundled": "sparse-bundled",
    "sparse, first-form reservation": "sparse-bundled-reserved",
    "sparse, bundled, C8": "sparse-bundled-c8",
    "sparse, split": "sparse-split",
    "sparse, split, C8": "sparse-split-c8",
    "sparse, split, C8 on A5": "sparse-split-c8-fp8",
    "packed 656-byte main cache": "packed-main",
    "indexer copied under decode context parallelism": "replicated-indexer",
    "cache-only": "cache-only",
    "cache-only, padded pages": "cache-only-padded",
    "hybrid attention and mamba in one raw tensor": "attention-and-mamba",
    "mamba states": "mamba",
    "DeepSeek V4": "deepseek-v4",
    "DeepSeek V4 on A5": "deepseek-v4-a5",
    "310P": "gqa-310p",
    "MLA with enable_kv_nz": "mla-nz",
    "kernel blocks": "kernel-blocks",
    "kernel blocks, padded": "padded-kernel-blocks",
}
"""What vLLM-Ascend allocates, and the row that is it."""
CASES_OF_PROPERTIES = {
    "layers without an indexer, bundled": "some-layers-without-indexer",
    "layers without an indexer, split, MTP with one": "some-layers-without-indexer-split",
    "MTP": "mtp",
    "more blocks than the manager's": "more-blocks-than-the-manager",
    "a layer that registers another's tensors": "shared-layer",
    "one storage": "one-storage",
    "656 bytes a token": "packed-main-656",
    "copies of a quantised indexer": "replicated-indexer-c8",
}
"""What any layout may have beside, and the case that has it."""


def cases() -> Iterator[str]:
    return (case for row in ROWS for case in row.cases)


def test_every_kind_has_its_row_and_every_row_its_kind() -> None:
    assert sorted(WANTED.values()) == sorted(row.name for row in ROWS)


def test_every_case_is_in_one_row_and_every_row_in_a_case() -> None:
    assert all(row.cases for row in ROWS)
    assert sorted(cases()) == sorted(NAMED_CASES)
    assert set(CASES_OF_PROPERTIES.values()) <= set(NAMED_CASES)


@pytest.mark.parametrize("name", NAMED_CASES)
def test_every_case_has_golden_vectors_of_all_its_groups(name: str) -> None:
    groups = {entry.group for entry in cache_spec(NAMED_CASES[name], 1, 0).entries}
    assert {f"{name} group {group}" if group else name for group in groups} <= set(GOLDEN)


def test_every_case_goes_round_on_every_target_in_every_way() -> None:
    marks = {mark.args[0]: mark.args[1] for mark in CacheRoundTrip.test_layout_in_one_process.pytestmark}  # type: ignore[attr-defined]
    assert marks == {"transfer": WAYS, "layout": NAMED_CASES}
    with simulator(64 << 20) as target:
        not_offered = {
            (name, way)
            for name, case in NAMED_CASES.items()
            for way in WAYS
            if target.offers(Deployment(case, transfer=way))
        }
    assert not_offered == {("deepseek-v4", "layerwise"), ("deepseek-v4-a5", "layerwise")}


def signature(spec: CacheSpec) -> set[Any]:
    """What an entry is, whatever its sizes: container, tensors, orders, holes, kernel blocks, second looks, storage."""
    raw_of = {id(view): i for i, raw in enumerate(spec.raw_tensors) for region in raw.regions for view in region.views}
    views: dict[str, list[Any]] = {entry.layer_name: [] for entry in spec.entries}
    first_raw: dict[str, int] = {}
    for region, view in spec.placed():
        one = view.component
        first = first_raw.setdefault(view.layer_name, raw_of[id(view)])
        strided = region.page_stride != one.kernel_bytes
        views[view.layer_name].append(
            (
                one.name, str(one.dtype), one.order, bool(one.num_tokens), one.heads_first, len(one.shape),
                strided, region.kernel_blocks, view.alias, raw_of[id(view)] - first,
            )
        )  # fmt: skip
    return {(entry.container, bool(entry.group), tuple(views[entry.layer_name])) for entry in spec.entries}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_first_case_of_a_row_is_the_row_in_small(row: Row) -> None:
    small, real = signature(cache_spec(NAMED_CASES[row.cases[0]], 1, 0)), signature(row.spec)
    assert real <= small


def test_no_two_rows_look_alike() -> None:
    """Only sizes tell two of them from another."""
    alike = {
        (one.name, other.name)
        for i, one in enumerate(ROWS)
        for other in ROWS[i + 1 :]
        if signature(one.spec) == signature(other.spec)
    }
    assert alike == {
        # V's head size, and what is reserved behind the indexer, are sizes.
        ("gqa", "gqa-other-v-head-size"),
        ("sparse-bundled", "sparse-bundled-reserved"),
    }


def read(caches: Caches, case: CacheCase) -> tuple[ShardLayout, ...]:
    """What the connector makes of them."""
    topology = topology_of(Deployment(case))
    return read_layouts(caches.kv_caches, [group_spec(caches, group, case, topology) for group in caches.groups])


@pytest.fixture(params=NAMED_CASES)
def case(request: pytest.FixtureRequest) -> CacheCase:
    return NAMED_CASES[request.param]


@pytest.fixture
def caches(case: CacheCase) -> Caches:
    """Four blocks a group; the third of each is looked at."""
    spec = cache_spec(case, 1, 0)
    return allocate(spec, 4 * len({entry.group for entry in spec.entries}), extra_blocks=max(1, case.spare_blocks))


BLOCK = 2


def ends_of(ranges: list[Range]) -> set[int]:
    """Addresses of the bytes in front of and behind each range, and in holes between two in a row."""
    ordered = sorted(ranges)
    ends = {address for start, size in ordered for address in (start - 1, start + size)}
    ends |= {(s + n + t) // 2 for (s, n), (t, _) in pairwise(ordered) if t > s + n}
    return {address for address in ends if not any(start <= address < start + size for start, size in ordered)}


def test_bytes_on_both_sides_of_every_page_and_in_every_hole_are_watched(caches: Caches) -> None:
    for group in caches.groups:
        caches.poison()
        own = caches.block_ranges([BLOCK], group)
        before = caches.snapshot()
        assert before.changed_outside(own) == []
        watched = ends_of(own)
        assert len(watched) >= 2
        for address in watched:
            byte = caches.arena.view(address, 1)
            assert byte[0] in (GUARD, POISON)
            byte[0] ^= 0xFF
            (damage,) = before.changed_outside(own)
            assert (damage.address, damage.size) == (address, 1)
            byte[0] ^= 0xFF


def test_every_byte_of_a_block_is_moved_once_and_no_other(caches: Caches, case: CacheCase) -> None:
    """A second look, or a second name, at the same bytes adds nothing."""
    for layout, group in zip(read(caches, case), caches.groups, strict=True):
        pieces = sorted(piece for component in layout.components for piece in component.pieces(BLOCK))
        assert all(start + size <= after for (start, size), (after, _) in pairwise(pieces)), "bytes are moved twice"
        own = sorted(set(caches.block_ranges([BLOCK], group)))
        moved = {address for start, size in pieces for address in range(start, start + size)}
        assert moved == {address for start, size in own for address in range(start, start + size)}
        assert layout.object_bytes == len(moved)


def is_a_prefix(caches: Caches, layer_name: str, index: int) -> bool:
    """Whether some of a block's tokens are the first bytes of its page."""
    place = caches.places[layer_name][index]
    tokens = place.component.num_tokens * place.kernel_blocks
    if tokens < 2:
        return True
    (start, size), *rest = caches.token_ranges(layer_name, index, BLOCK, tokens // 2)
    whole = sum(n for _, n in caches.pages(layer_name, index, BLOCK))
    return not rest and start == caches.pages(layer_name, index, BLOCK)[0][0] and size == whole // 2


def test_pages_in_nz_order_are_no_prefixes_and_only_whole_pages_are_moved(caches: Caches, case: CacheCase) -> None:
    """Were part of a block moved as a prefix of its page, it would be other tokens' bytes."""
    layouts = read(caches, case)
    for name in caches.layer_names():
        for index, place in enumerate(caches.places[name]):
            columns = place.component.kernel_bytes // (
                max(1, place.component.num_tokens) * FRACTAL_COLUMNS * place.component.dtype.itemsize
            )
            if place.component.order is Order.NZ and columns > 1:
                assert not is_a_prefix(caches, name, index)
    whole = Counter(
        place.component.kernel_bytes * place.kernel_blocks
        for name in caches.layer_names()
        for place in caches.places[name]
        if not place.alias
    )
    copied = max(1, case.indexer_copies)
    moved = Counter(component.page_bytes for layout in layouts for component in layout.components)
    if copied == 1:
        assert moved == whole
    assert sum(size * count for size, count in moved.items()) == sum(size * count for size, count in whole.items())


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.title)
def test_the_connector_counts_what_models_have(number: Number) -> None:
    spec = number.spec(mtp=number.has_mtp)
    caches = allocate(spec, 1, kv_transfer=False)
    kind = "attention" if number.model.startswith("qwen") else "latent"
    (layout,) = read_layouts(caches.kv_caches, [GroupSpec(tuple(caches.kv_caches), 128, 1, kind=kind)])
    assert (layout.object_bytes, layout.num_pieces) == (spec.block_bytes, spec.num_buffers)


def test_a_row_that_loses_its_case_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(row, cases=("mla",)) if row.name == "mla-nz" else row for row in ROWS]
    monkeypatch.setattr("tests.conformance.test_layouts.ROWS", tuple(rows))
    with pytest.raises(AssertionError):
        test_every_case_is_in_one_row_and_every_row_in_a_case()
    with pytest.raises(AssertionError):
        test_the_first_case_of_a_row_is_the_row_in_small(next(row for row in rows if row.name == "mla-nz"))
