"""A flipped bit anywhere in any layout's object is found, its block is computed, and the object makes room."""

from __future__ import annotations

import random

import pytest

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_conformance.suites.round_trip import fresh, load_all, moved, offered, save_all
from tests.conformance.vectors import expected_pages, groups
from tests.targets.target import Target

pytestmark = pytest.mark.kvpool_capability("integrity")


def flip(backend: Target, key: str, bit: int) -> None:
    """Change one bit of an object, round the connector."""
    value = backend.peek(key)
    assert value is not None
    backend.poke(key, bit // 8, bytes([value[bit // 8] ^ (1 << bit % 8)]))


@pytest.mark.parametrize("transfer", ["packed", "layerwise"])
@pytest.mark.parametrize("layout", NAMED_CASES)
def test_a_flipped_bit_in_any_component_is_found(backend: Target, layout: str, transfer: str) -> None:
    deployment = offered(backend, Deployment(NAMED_CASES[layout], integrity="on", transfer=transfer))
    dice, one_group = random.Random(layout), len(groups(deployment)) == 1
    with backend.node(deployment) as source, backend.node(deployment) as target:
        first = fresh()
        save_all(source, {0: first})
        value = backend.peek(backend.key(deployment, 0, first))
        assert value is not None
        sizes = [len(page) for page in expected_pages(deployment, 0)]
        assert len(value) == sum(sizes) + 8 * len(sizes)
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        bits = [8 * start + dice.randrange(8 * size) for start, size in zip(starts, sizes, strict=True)]
        bits.append(8 * sum(sizes) + dice.randrange(64 * len(sizes)))
        for bit in bits:
            contents = {1: fresh(), 7: fresh(), 2: fresh()}
            save_all(source, contents)
            key = backend.key(deployment, 0, contents[7])
            flip(backend, key, bit)
            target.poison()
            assert target.load(contents) == {7}, f"bit {bit} of {8 * len(value)}"
            assert not target.mismatches({1: contents[1], 2: contents[2]})
            # Of the other groups block 7 was loaded well, and layer by layer the layers in front of the broken one.
            untouched = one_group and transfer == "packed"
            assert not target.changed_outside([1, 2] if untouched else [1, 2, 7])
            assert backend.peek(key) is None, "a broken object stays and is hit again"
            save_all(source, contents)
            load_all(target, moved(contents, (3, 5, 9)))


@pytest.mark.parametrize("layout", NAMED_CASES)
def test_layers_and_whole_blocks_make_the_same_objects_with_checksums(backend: Target, layout: str) -> None:
    ways = [
        offered(backend, Deployment(NAMED_CASES[layout], integrity="on", transfer=transfer))
        for transfer in ("packed", "layerwise")
    ]
    with backend.node(ways[0]) as whole, backend.node(ways[1]) as layers:
        for saving, loading in ((whole, layers), (layers, whole)):
            contents = {1: fresh(), 7: fresh(), 2: fresh()}
            save_all(saving, contents)
            first = {content: backend.peek(backend.key(ways[0], 0, content)) for content in contents.values()}
            load_all(loading, moved(contents, (3, 0, 5)))
            for content in contents.values():
                backend.lose(ways[0], 0, content)
            save_all(loading, contents)
            assert {content: backend.peek(backend.key(ways[0], 0, content)) for content in contents.values()} == first


def test_sampling_compares_some_and_shares_with_all(backend: Target) -> None:
    """Whoever compares one in sixteen writes and reads the very objects of whoever compares all."""
    case = NAMED_CASES["sparse-split-c8"]
    every, some = Deployment(case, integrity="on"), Deployment(case, integrity="sampled")
    with backend.node(every) as source, backend.node(some) as target:
        found = 0
        for _ in range(4):
            contents = {block_id: fresh() for block_id in range(8)}
            save_all(source, contents)
            assert target.hits(list(contents.values())) == 8
            for content in contents.values():
                flip(backend, backend.key(every, 0, content), 5)
            target.poison()
            found += len(target.load(contents))
    assert found == 32 // 16


@pytest.mark.parametrize("integrity", ["off", "on"])
def test_with_and_without_checksums_are_apart(backend: Target, integrity: str) -> None:
    case = NAMED_CASES["mla"]
    other = {"off": "on", "on": "off"}[integrity]
    with (
        backend.node(Deployment(case, integrity=integrity)) as source,
        backend.node(Deployment(case, integrity=other)) as target,
    ):
        contents = {1: fresh(), 2: fresh()}
        save_all(source, contents)
        assert source.hits(list(contents.values())) == 2
        assert target.hits(list(contents.values())) == 0
        assert target.load(contents) == {1, 2}
