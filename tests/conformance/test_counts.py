"""Bytes and the queue of saves are counted alike by every way of transfer."""

from __future__ import annotations

import pytest

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_conformance.suites.round_trip import WAYS, fresh
from tests.targets.node import LocalNode
from tests.targets.target import Target

pytestmark = pytest.mark.kvpool_capability("counts")


@pytest.mark.parametrize(("way", "integrity"), [*((way, "off") for way in WAYS), ("packed", "on")])
def test_bytes_and_queue(backend: Target, way: str, integrity: str) -> None:
    """What is lost is not counted as loaded, what was there already not as stored."""
    deployment = Deployment(NAMED_CASES["sparse-split-c8"], transfer=way, integrity=integrity)
    contents = {block_id: fresh() for block_id in (1, 7, 2)}
    with backend.open() as store, backend.node(deployment):
        node = LocalNode(deployment, 0, store, memory=backend.memory())
        node.fill(contents)
        node.save(contents)
        value = backend.peek(backend.key(deployment, 0, contents[7]))
        assert value is not None
        node.save(contents)
        backend.lose(deployment, 0, contents[7])
        assert node.load(contents) == {7}
        counts = node.counts()
        assert counts["save_bytes"] == 3 * len(value)
        assert counts["load_bytes"] == 2 * len(value)
        assert counts["save_queue_entered"] == counts["save_queue_left"] == 6
        node.close()
