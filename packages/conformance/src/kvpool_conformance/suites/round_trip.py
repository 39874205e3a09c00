"""What is saved comes back, byte for byte, into any blocks, in any process, and nothing else changes."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from kvpool_conformance.asking import ask, node_of
from kvpool_conformance.backend import CacheBackend, Node
from kvpool_conformance.cases import NAMED_CASES, CacheCase, Deployment
from kvpool_conformance.strategies import cases, tables

MAX_EXAMPLES = 12
WAYS = ("packed", "direct", "layerwise")
_numbers = itertools.count()


def fresh(prefix: str = "block") -> str:
    """A content that nobody has used: suites may share one pool."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}-{next(_numbers)}"


def offered(backend: CacheBackend, deployment: Deployment) -> Deployment:
    """Skip, counted, what the backend says it does not offer."""
    reason = ask(backend, "offers", deployment)
    if reason:
        pytest.skip(f"not offered: {reason}")
    return deployment


def save_all(node: Node, contents: dict[int, str]) -> None:
    """Fill and save; every block must be in the pool afterwards."""
    node.fill(contents)
    stored = node.save(contents)
    assert stored == len(contents), f"{stored} of {len(contents)} blocks were stored"


def load_all(node: Node, contents: dict[int, str]) -> None:
    """Load over poison; every byte of every page must be right and no other byte may have changed."""
    node.poison()
    failed = node.load(contents)
    assert not failed, f"blocks {sorted(failed)} were reported as not loaded"
    wrong = node.mismatches(contents)
    assert not wrong, "wrong bytes after a load:\n" + "\n".join(wrong[:8])
    changed = node.changed_outside(list(contents))
    assert not changed, "bytes outside the loaded pages changed:\n" + "\n".join(changed[:8])


def moved(contents: dict[int, str], block_ids: Sequence[int]) -> dict[int, str]:
    """The same contents in other blocks, in another order."""
    return dict(zip(block_ids, reversed(contents.values()), strict=True))


@pytest.mark.kvpool_capability("round trips")
class CacheRoundTrip:
    """Subclass, and give a fixture `backend` that returns a `CacheBackend`."""

    @pytest.mark.parametrize("transfer", WAYS)
    @pytest.mark.parametrize("layout", NAMED_CASES)
    def test_layout_in_one_process(self, backend: CacheBackend, layout: str, transfer: str) -> None:
        """Each named layout: saved by one node, loaded by another of the same process."""
        self.round_trip(backend, Deployment(NAMED_CASES[layout], transfer=transfer), elsewhere=False)

    @pytest.mark.parametrize("layout", ["gqa", "mla", "sparse-bundled-c8", "sparse-split", "padded-kernel-blocks"])
    def test_layout_in_another_process(self, backend: CacheBackend, layout: str) -> None:
        """Saved here, loaded by another process."""
        self.round_trip(backend, Deployment(NAMED_CASES[layout]), elsewhere=True)

    def round_trip(self, backend: CacheBackend, deployment: Deployment, *, elsewhere: bool) -> None:
        """Save some blocks, load them elsewhere."""
        offered(backend, deployment)
        contents = {block_id: fresh() for block_id in (1, 7, 2, 11)}
        with node_of(backend, deployment) as source:
            save_all(source, contents)
            with node_of(backend, deployment, elsewhere=elsewhere) as target:
                load_all(target, moved(contents, (3, 0, 10, 5)))

    @pytest.mark.kvpool_capability("layouts at random")
    def test_any_layout_and_block_table(self, backend: CacheBackend) -> None:
        """Layouts and tables at random."""

        @settings(
            max_examples=MAX_EXAMPLES,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        )
        @given(st.data(), cases(), st.sampled_from(WAYS))
        def check(data: st.DataObject, case: CacheCase, transfer: str) -> None:
            deployment = Deployment(case, transfer=transfer)
            if ask(backend, "offers", deployment):
                return
            saved_in = data.draw(tables(case.num_blocks))
            loaded_in = data.draw(st.permutations(range(case.num_blocks)))[: len(saved_in)]
            contents = {block_id: fresh() for block_id in saved_in}
            note(f"{deployment}: saved in {saved_in}, loaded into {loaded_in}")
            with node_of(backend, deployment) as source, node_of(backend, deployment) as target:
                save_all(source, contents)
                load_all(target, moved(contents, loaded_in))

        check()

    @pytest.mark.parametrize("transfers", list(itertools.permutations(WAYS, 2)), ids="-then-".join)
    def test_one_way_of_transfer_serves_the_other(self, backend: CacheBackend, transfers: tuple[str, str]) -> None:
        """Objects do not depend on how they are moved."""
        case = NAMED_CASES["sparse-bundled-c8"]
        first, second = (offered(backend, Deployment(case, transfer=transfer)) for transfer in transfers)
        contents = {1: fresh(), 2: fresh()}
        with node_of(backend, first) as source, node_of(backend, second) as target:
            save_all(source, contents)
            load_all(target, moved(contents, (5, 4)))

    @pytest.mark.parametrize("layout", NAMED_CASES)
    def test_layers_and_whole_blocks_serve_each_other(self, backend: CacheBackend, layout: str) -> None:
        """Each named layout: a pool filled layer by layer serves whole blocks, and the other way round."""
        whole, layers = (
            offered(backend, Deployment(NAMED_CASES[layout], transfer=transfer)) for transfer in ("packed", "layerwise")
        )
        with node_of(backend, whole) as one, node_of(backend, layers) as other:
            for source, target in ((one, other), (other, one)):
                contents = {1: fresh(), 2: fresh()}
                save_all(source, contents)
                load_all(target, moved(contents, (5, 4)))

    def test_a30_bundled_and_split_indexers_share(self, backend: CacheBackend) -> None:
        """Both registrations of a sparse cache hold the same content."""
        bundled = offered(backend, Deployment(NAMED_CASES["sparse-bundled"]))
        split = offered(backend, Deployment(NAMED_CASES["sparse-split"]))
        contents = {1: fresh(), 2: fresh()}
        with node_of(backend, bundled) as source, node_of(backend, split) as target:
            save_all(source, contents)
            assert target.hits(list(contents.values())) == 2
            load_all(target, moved(contents, (5, 4)))

    def test_saving_again_changes_nothing(self, backend: CacheBackend) -> None:
        """A key stands for its first content."""
        deployment = offered(backend, Deployment(NAMED_CASES["mla"]))
        contents = {1: fresh(), 2: fresh()}
        with node_of(backend, deployment) as source, node_of(backend, deployment) as target:
            save_all(source, contents)
            source.fill({1: fresh("other"), 2: fresh("other")})
            assert source.save(contents) == 2
            load_all(target, contents)

    @pytest.mark.parametrize("position", [0, 2, 4], ids=["first", "middle", "last"])
    @pytest.mark.kvpool_capability("lost blocks")
    def test_a_lost_block_is_reported_and_no_other(self, backend: CacheBackend, position: int) -> None:
        """Exactly the lost block fails; the others are right."""
        deployment = offered(backend, Deployment(NAMED_CASES["gqa"]))
        contents = {block_id: fresh() for block_id in range(5)}
        names = list(contents.values())
        with node_of(backend, deployment) as source, node_of(backend, deployment) as target:
            save_all(source, contents)
            assert source.hits(names) == 5
            ask(backend, "lose", deployment, 0, names[position])
            assert source.hits(names) == position, "a hit is the leading run"
            target.poison()
            assert target.load(contents) == {position}
            rest = {block_id: name for block_id, name in contents.items() if block_id != position}
            assert not target.mismatches(rest)
            assert not target.changed_outside(list(contents))

    @pytest.mark.kvpool_capability("lost blocks")
    def test_what_was_never_saved_is_a_miss(self, backend: CacheBackend) -> None:
        """A load of nothing reports every block and touches none."""
        deployment = offered(backend, Deployment(NAMED_CASES["mla"]))
        contents = {1: fresh(), 2: fresh()}
        with node_of(backend, deployment) as node:
            assert node.hits(list(contents.values())) == 0
            node.poison()
            assert node.load(contents) == {1, 2}
            assert not node.changed_outside(list(contents))
