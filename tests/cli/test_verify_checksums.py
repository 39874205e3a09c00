"""`verify` on what the connector itself wrote: a flipped bit is found and its component named, in every layout."""

from __future__ import annotations

import random

import pytest

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_connector.cli.checksums import sum_64
from kvpool_connector.contract.descriptor import Descriptor
from tests.cli.pool import Pool
from tests.targets.borrowed import Borrowed
from tests.targets.node import LocalNode, block_hash


@pytest.mark.parametrize("layout", NAMED_CASES)
def test_a_flipped_bit_in_any_component_is_found_and_named(pool: Pool, namespace: str, layout: str) -> None:
    """One object for each component, with one bit of it flipped, and one whole object beside them."""
    case = NAMED_CASES[layout]
    deployment = Deployment(case, namespace=namespace, integrity="on")
    node = LocalNode(deployment, 0, Borrowed(pool.store))
    (ranks,) = [ranks for ranks in node.all_ranks() if ranks.rank.tp == 0]
    shard, descriptor = ranks.shards(0)[0], ranks.descriptors[0][0]
    assert shard is not None
    assert isinstance(descriptor, Descriptor)
    names = [f"{layer.label}.{c.name}" for layer in descriptor.layers for c in layer.components]
    sizes = [c.page_bytes for layer in descriptor.layers for c in layer.components]
    contents = ["whole", *names]
    for start in range(0, len(contents), case.num_blocks):
        blocks = dict(enumerate(contents[start : start + case.num_blocks]))
        node.fill(blocks)
        assert node.save(blocks) == len(blocks)
    node.close()
    assert pool.ask("verify", "--namespace", namespace)["checked"] == (len(contents) + 1) * len(ranks.descriptors)
    dice, flipped = random.Random(layout), {}
    for k, name in enumerate(names):
        key = shard.key(block_hash(name))
        value = bytearray(pool.store.read(key)[1])
        value[sum(sizes[:k]) + dice.randrange(sizes[k])] ^= 1 << dice.randrange(8)
        pool.overwrite(key, bytes(value))
        flipped[key] = (name, bytes(value))
    found = pool.ask("verify", "--namespace", namespace, status=2)["wrong"]
    assert {fault["key"]: fault["why"].split(": ")[1] for fault in found} == {
        k: name for k, (name, _) in flipped.items()
    }
    assert all(pool.store.read(key)[1] == value for key, (_, value) in flipped.items()), "verify changes nothing"


def test_objects_without_checksums_are_counted(pool: Pool, namespace: str) -> None:
    node = LocalNode(Deployment(NAMED_CASES["mla"], namespace=namespace), 0, Borrowed(pool.store))
    node.fill({1: "a"})
    node.save({1: "a"})
    node.close()
    assert pool.ask("verify", "--namespace", namespace)["without_checksum"] == 1


def test_the_sum_is_the_one_of_the_documentation() -> None:
    words = [3, 2**64 - 1, 7]
    page = b"".join(word.to_bytes(8, "little") for word in words)[:-3]
    expected = sum(int.from_bytes((page + bytes(3))[8 * i : 8 * i + 8], "little") * (2 * i + 1) for i in range(3))
    assert sum_64(page) == (expected % 2**64).to_bytes(8, "little")
