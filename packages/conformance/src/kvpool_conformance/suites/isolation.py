"""Who may share and who must not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvpool_conformance.asking import ask, node_of
from kvpool_conformance.backend import CacheBackend
from kvpool_conformance.cases import NAMED_CASES, CacheCase, Deployment
from kvpool_conformance.suites.round_trip import fresh, load_all, moved, offered, save_all

GQA = Deployment(NAMED_CASES["mha"])
OTHERS: dict[str, Deployment] = {
    "kv-dtype": GQA.with_case(dtype="float16"),
    "tp-size": Deployment(NAMED_CASES["mha"], tp_size=2),
    "block-size": GQA.with_case(block_size=32),
    "layer-count": GQA.with_case(num_layers=3),
    "head-dim": GQA.with_case(head_dim=32, v_head_dim=128 - 32),
    "mtp": GQA.with_case(mtp=True),
    "model": Deployment(NAMED_CASES["mha"], model="another"),
    "namespace": Deployment(NAMED_CASES["mha"], namespace="another"),
}
"""Deployments that differ from `GQA` in one thing that decides the bytes, or in the namespace."""
SPLIT_LAYOUTS: dict[str, CacheCase] = {
    name: NAMED_CASES[name] for name in ("gqa-other-v-head-size", "kernel-blocks", "gqa-310p-nz", "shared-layer")
} | {"padded-blocks": CacheCase("gqa", padding=96)}
"""Layouts with KV heads, one for each way in which they can lie."""


def assert_strangers(backend: CacheBackend, first: Deployment, second: Deployment) -> None:
    """What either stores the other misses, and fails to load rather than lies."""
    for ours, theirs in ((first, second), (second, first)):
        contents = {1: fresh(), 2: fresh()}
        with node_of(backend, ours) as source, node_of(backend, theirs) as target:
            save_all(source, contents)
            assert target.hits(list(contents.values())) == 0
            target.poison()
            assert target.load(contents) == {1, 2}


@pytest.mark.kvpool_capability("isolation of deployments")
class Isolation:
    """Subclass, and give a fixture `backend` that returns a `CacheBackend`."""

    @pytest.mark.parametrize("difference", OTHERS)
    def test_b6_deployments_that_differ_do_not_share(self, backend: CacheBackend, difference: str) -> None:
        """Same content names, one store: no hit across, in either direction, and a load fails rather than lies."""
        assert_strangers(backend, offered(backend, GQA), offered(backend, OTHERS[difference]))

    @pytest.mark.parametrize("family", ["mla", "sparse-split"])
    def test_byte_orders_do_not_share(self, backend: CacheBackend, family: str) -> None:
        """ND and NZ have equal shapes and sizes: only the configuration tells them apart."""
        rows = offered(backend, Deployment(NAMED_CASES[family]).with_case(rope_dim=16))
        assert_strangers(backend, rows, offered(backend, rows.with_case(kv_nz=True)))

    def test_a17_quantised_and_plain_indexers_do_not_share(self, backend: CacheBackend) -> None:
        """C8 on and off, made to have equal byte counts."""
        plain = offered(backend, Deployment(NAMED_CASES["sparse-bundled"]).with_case(dtype="int8", index_dim=18))
        quantised = offered(
            backend, Deployment(NAMED_CASES["sparse-bundled"]).with_case(dtype="int8", index_dim=16, c8="int8")
        )
        assert_strangers(backend, plain, quantised)

    @pytest.mark.parametrize(("saved_at", "loaded_at"), [(1, 8), (8, 1), (4, 2)])
    @pytest.mark.kvpool_capability("sharing over ranks")
    def test_latent_caches_are_shared_between_tensor_parallel_sizes(
        self, backend: CacheBackend, saved_at: int, loaded_at: int
    ) -> None:
        """MLA and DSA are replicated: a pool written at one size serves every other, and is written once."""
        source = offered(backend, Deployment(NAMED_CASES["sparse-bundled"], tp_size=saved_at))
        target = offered(backend, Deployment(NAMED_CASES["sparse-bundled"], tp_size=loaded_at))
        contents = {block_id: fresh() for block_id in range(8)}
        stored = 0
        for rank in range(saved_at):
            with node_of(backend, source, rank) as node:
                node.fill(contents)
                stored += node.save(contents)
        assert stored == len(contents), "the ranks share the work of writing: every block once"
        with node_of(backend, target, loaded_at - 1) as node:
            assert node.hits(list(contents.values())) == len(contents)
            load_all(node, moved(contents, (8, 9, 10, 11, 3, 2, 1, 0)))

    @pytest.mark.parametrize("missing", [0, 1, 3])
    @pytest.mark.kvpool_capability("sharing over ranks")
    def test_b1_a_hit_needs_every_rank(self, backend: CacheBackend, missing: int) -> None:
        """Heads split over four ranks: one rank's lost object ends the hit there, whoever is asked."""
        deployment = offered(backend, Deployment(NAMED_CASES["mha"], tp_size=4))
        contents = {block_id: fresh() for block_id in range(4)}
        names = list(contents.values())
        for rank in range(4):
            with node_of(backend, deployment, rank) as node:
                save_all(node, contents)
        with node_of(backend, deployment, 2) as node:
            assert node.hits(names) == 4
            ask(backend, "lose", deployment, missing, names[2])
            assert node.hits(names) == 2

    @pytest.mark.parametrize("tp_size", [2, 4, 8, 16])
    @pytest.mark.kvpool_capability("sharing over ranks")
    def test_every_rank_gets_its_own_heads(self, backend: CacheBackend, tp_size: int) -> None:
        """Eight heads over two to sixteen ranks: each rank's bytes are its heads'."""
        deployment = offered(backend, Deployment(NAMED_CASES["mha"], tp_size=tp_size))
        contents = {1: fresh(), 5: fresh(), 6: fresh()}
        for rank in range(tp_size):
            with node_of(backend, deployment, rank) as node:
                node.fill(contents)
                node.save(contents)
        for rank in (0, 1, tp_size - 1):
            with node_of(backend, deployment, rank) as node:
                load_all(node, moved(contents, (2, 3, 9)))

    @pytest.mark.parametrize("num_heads", [4, 8])
    @pytest.mark.parametrize(("saved_at", "loaded_at"), list(itertools.product((1, 2, 4, 8), repeat=2)))
    @pytest.mark.kvpool_capability("sharing over ranks")
    def test_heads_are_shared_between_tensor_parallel_sizes(
        self, backend: CacheBackend, num_heads: int, saved_at: int, loaded_at: int
    ) -> None:
        """Each KV head an object: what one size stores every other finds whole and loads byte for byte."""
        heads = split(num_heads=num_heads)
        assert_shared(backend, replace(heads, tp_size=saved_at), replace(heads, tp_size=loaded_at))

    @pytest.mark.parametrize("layout", SPLIT_LAYOUTS)
    @pytest.mark.parametrize("transfer", ["packed", "direct", "layerwise"])
    @pytest.mark.parametrize(("saved_at", "loaded_at"), [(4, 2), (2, 4)])
    @pytest.mark.kvpool_capability("sharing over ranks")
    def test_layouts_whose_heads_are_shared(
        self, backend: CacheBackend, layout: str, transfer: str, saved_at: int, loaded_at: int
    ) -> None:
        """However the pages lie and are moved; two heads an object, which is what sizes 2 and 4 have in common."""
        heads = replace(split(SPLIT_LAYOUTS[layout], num_heads=8), kv_head_split=(2, 4), transfer=transfer)
        assert_shared(backend, replace(heads, tp_size=saved_at), replace(heads, tp_size=loaded_at))

    @pytest.mark.parametrize("part", [0, 3])
    @pytest.mark.kvpool_capability("sharing over ranks")
    def test_a_hit_needs_every_head(self, backend: CacheBackend, part: int) -> None:
        """Four heads a rank, each an object: one lost object ends the hit there, and its block is not loaded."""
        deployment = offered(backend, replace(split(num_heads=8), tp_size=2))
        contents = {block_id: fresh() for block_id in range(4)}
        names = list(contents.values())
        for rank in range(2):
            with node_of(backend, deployment, rank) as node:
                save_all(node, contents)
        with node_of(backend, deployment, 1) as node:
            assert node.hits(names) == 4
            ask(backend, "lose", deployment, 1, names[2], part)
            assert node.hits(names) == 2
            node.poison()
            assert node.load(contents) == {2}
            assert not node.mismatches({block_id: contents[block_id] for block_id in (0, 1, 3)})

    @pytest.mark.parametrize("transfer", ["packed", "direct", "layerwise"])
    @pytest.mark.kvpool_capability("sharing over ranks")
    def test_a_block_of_which_some_heads_are_there_is_completed(self, backend: CacheBackend, transfer: str) -> None:
        """Three of eight ranks stored their heads; an engine of one rank stores the others."""
        heads = replace(split(num_heads=8), transfer=transfer)
        contents = {block_id: fresh() for block_id in range(4)}
        source, target = (offered(backend, replace(heads, tp_size=tp_size)) for tp_size in (8, 1))
        for rank in (0, 3, 7):
            with node_of(backend, source, rank) as node:
                save_all(node, contents)
        with node_of(backend, target) as node:
            assert node.hits(list(contents.values())) == 0
            save_all(node, contents)
            assert node.hits(list(contents.values())) == len(contents)
        with node_of(backend, source, 5) as node:
            load_all(node, moved(contents, (4, 5, 6, 7)))


def split(case: CacheCase = NAMED_CASES["mha"], **changes: object) -> Deployment:
    """A deployment whose heads are stored each by itself."""
    return Deployment(case, kv_head_split="head").with_case(**changes)


def assert_shared(backend: CacheBackend, source: Deployment, target: Deployment) -> None:
    """What all ranks of one store, ranks with the same heads in shares, all ranks of the other find and load."""
    source, target = offered(backend, source), offered(backend, target)
    contents = {block_id: fresh() for block_id in (0, 3, 4, 5)}
    stored = 0
    for rank in range(source.tp_size):
        with node_of(backend, source, rank) as node:
            node.fill(contents)
            stored += node.save(contents)
    assert stored == len(contents) * min(source.tp_size, source.case.num_heads), "every head of every block once"
    for rank in range(target.tp_size):
        with node_of(backend, target, rank) as node:
            assert node.hits(list(contents.values())) == len(contents)
            load_all(node, moved(contents, (5, 1, 8, 9)))
