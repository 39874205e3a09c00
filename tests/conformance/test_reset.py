"""A reset against each store: leased objects and saves under way too, and no other namespace."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_conformance.suites.round_trip import fresh
from kvpool_connector.contract.clock import MonotonicClock
from kvpool_connector.contract.shards import ShardMap
from kvpool_connector.contract.store import Store
from kvpool_connector.epoch import newest_epoch
from kvpool_connector.lookup import StoreLookup
from kvpool_connector.outage import Outage
from kvpool_connector.scheduler import PoolScheduler
from kvpool_connector.tracker import GroupRule, RequestView
from tests.targets.node import LocalNode, block_hash, topology_of
from tests.targets.target import Target

pytestmark = pytest.mark.kvpool_capability("reset")


class Scheduling:
    """A scheduler side of its own over the node's shards."""

    def __init__(self, node: LocalNode, store: Store, deployment: Deployment) -> None:
        self._block_size = deployment.case.block_size
        lookup = StoreLookup(store, Outage(MonotonicClock(), 5.0), 10.0)
        self.scheduler = PoolScheduler([GroupRule(self._block_size)], self._block_size, lookup)
        self.scheduler.set_shards(ShardMap(topology_of(deployment), node.all_ranks()))

    def hits(self, contents: Sequence[str]) -> int:
        """Blocks at the front that the pool has."""
        tokens = (len(contents) + 1) * self._block_size
        view = RequestView(uuid.uuid4().hex, tokens, tokens, [block_hash(content) for content in contents])
        return self.scheduler.num_matched_tokens(view, 0)[0] // self._block_size


@contextmanager
def one(backend: Target, namespace: str) -> Iterator[tuple[LocalNode, Scheduling, Scheduling]]:
    """A worker side and two scheduler sides of a namespace."""
    deployment = Deployment(NAMED_CASES["sparse-bundled"], namespace=namespace)
    with backend.open() as store, backend.open() as first, backend.open() as second:
        node = LocalNode(deployment, 0, store, memory=backend.memory())
        sides = [Scheduling(node, asking, deployment) for asking in (first, second)]
        try:
            yield node, sides[0], sides[1]
        finally:
            for side in sides:
                side.scheduler.close()
            node.close()


def save(node: LocalNode, contents: dict[int, str]) -> None:
    node.fill(contents)
    assert node.save(contents) == len(contents)


def test_what_is_leased_is_reset_and_other_namespaces_are_not(backend: Target) -> None:
    name = uuid.uuid4().hex
    contents = {1: fresh(), 2: fresh()}
    with one(backend, name) as (node, first, second), one(backend, f"{name}-other") as (other, theirs, _):
        save(node, contents)
        save(other, contents)
        # The lookups lease what they find.
        assert [side.hits(list(contents.values())) for side in (first, second, theirs)] == [2, 2, 2]
        assert first.scheduler.reset()
        assert [side.hits(list(contents.values())) for side in (first, second, theirs)] == [0, 0, 2]
        assert (first.scheduler.epoch, second.scheduler.epoch, theirs.scheduler.epoch) == (1, 1, 0)
        with one(backend, name) as (_, later, _):
            assert later.scheduler.epoch == 1
            assert later.hits(list(contents.values())) == 0


def test_a_save_that_ends_after_the_reset_stays_in_its_epoch(backend: Target) -> None:
    contents = {1: fresh(), 2: fresh()}
    with one(backend, uuid.uuid4().hex) as (node, first, second):
        assert first.scheduler.reset()
        save(node, contents)  # in epoch 0: of the reset no worker has heard
        assert [side.hits(list(contents.values())) for side in (first, second)] == [0, 0]


def test_two_resets_are_two_epochs(backend: Target) -> None:
    namespace = uuid.uuid4().hex
    with one(backend, namespace) as (_, first, second):
        assert first.scheduler.reset()
        assert second.scheduler.reset()
        assert second.scheduler.epoch == 2
        assert first.hits([fresh()]) == 0
        assert first.scheduler.epoch == 2
        with backend.open() as store:
            assert newest_epoch(store.exist, namespace) == 2
