"""An audit against each store: a right one is not accused, one that loses or changes bytes is found out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_conformance.suites.round_trip import fresh, load_all, moved, offered
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces
from tests.conformance.vectors import groups
from tests.targets.borrowed import Borrowed
from tests.targets.node import LocalNode
from tests.targets.target import Target

pytestmark = pytest.mark.kvpool_capability("audit")


class Losing(Borrowed):
    """Says that all was stored; the last object never was."""

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return [*(super().put(keys[:-1], addresses[:-1], sizes[:-1]) if keys[1:] else []), Status.OK]


class Changing(Borrowed):
    """Stores the first object with one bit of its middle byte flipped."""

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        byte = ctypes.c_ubyte.from_address(addresses[0][0] + sizes[0][0] // 2)
        byte.value ^= 8
        statuses = super().put(keys, addresses, sizes)
        byte.value ^= 8
        return statuses


def blocks(node: LocalNode) -> dict[str, int]:
    """What the node has counted, of blocks."""
    return {name: count for name, count in node.counts().items() if "_blocks_" in name}


@pytest.mark.parametrize("transfer", ["packed", "layerwise"])
@pytest.mark.parametrize("integrity", ["off", "on"])
@pytest.mark.parametrize("layout", NAMED_CASES)
def test_a_right_store_is_not_accused(backend: Target, layout: str, integrity: str, transfer: str) -> None:
    deployment = offered(backend, Deployment(NAMED_CASES[layout], integrity=integrity, transfer=transfer))
    contents = {block_id: fresh() for block_id in (1, 7, 2)}
    with backend.open() as store, backend.node(deployment) as target:
        source = LocalNode(deployment, 0, store, memory=backend.memory(), audit_every=1)
        source.fill(contents)
        assert source.save(contents) == 3
        stored = 3 * len(groups(deployment))
        assert blocks(source) == {"save_blocks_stored": stored, "audit_blocks_ok": stored}
        load_all(target, moved(contents, (3, 0, 5)))
        source.close()


@pytest.mark.parametrize("integrity", ["off", "on"])
@pytest.mark.parametrize(
    ("fault", "counted", "status"), [(Losing, "audit_blocks_lost", "miss"), (Changing, "audit_blocks_wrong", "corrupt")]
)
def test_a_wrong_store_is_found_out(
    backend: Target, fault: type[Borrowed], counted: str, status: str, integrity: str
) -> None:
    """Without the audit the same store is believed."""
    deployment = Deployment(NAMED_CASES["sparse-split-c8"], integrity=integrity)
    for every in (0, 1):
        contents = {block_id: fresh() for block_id in range(4)}
        with backend.open() as store:
            node = LocalNode(deployment, 0, fault(store), audit_every=every)
            node.fill(contents)
            assert node.save(contents) == (3 if every else 4)
            counts = blocks(node)
            expected = {"save_blocks_stored": 4}
            if every:
                expected = {"save_blocks_stored": 3, f"save_blocks_{status}": 1, "audit_blocks_ok": 3, counted: 1}
            assert counts == expected
            node.close()
