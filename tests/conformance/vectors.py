"""Golden vectors: for each layout and some topologies the key, the size and the hash of one block's object.

They are written by `python -m tests.conformance.vectors`, from plain loops over the simulated caches' own pages, and
checked against what the connector stores. A change of format without a new `FORMAT_VERSION` fails the check.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_connector.contract.descriptor import FORMAT_VERSION
from kvpool_simulator.device import allocate
from kvpool_simulator.device.content import page_content
from tests.targets.caches import cache_spec, content_name
from tests.targets.simulator import SimulatorTarget, simulator

PATH = Path(__file__).with_name("vectors.json")
CONTENT = "golden"
BLOCK = 3

DEPLOYMENTS: dict[str, tuple[Deployment, int]] = {
    **{name: (Deployment(case), 0) for name, case in NAMED_CASES.items()},
    **{f"mha tp{tp} rank{tp - 1}": (Deployment(NAMED_CASES["mha"], tp_size=tp), tp - 1) for tp in (2, 4, 8, 16)},
    **{f"sparse-split tp{tp}": (Deployment(NAMED_CASES["sparse-split"], tp_size=tp), tp - 1) for tp in (2, 8)},
    # A shard says which tokens it has, not whether prefill or decode context parallelism gave it them.
    **{
        f"{name} tp4 dcp{size} rank3": (Deployment(NAMED_CASES[name], tp_size=4, dcp_size=size, interleave=16), 3)
        for name in ("mla", "sparse-split")
        for size in (2, 4)
    },
    "gqa tp4 dcp2 rank3": (Deployment(NAMED_CASES["gqa"], tp_size=4, dcp_size=2, interleave=16), 3),
    "gqa direct": (Deployment(NAMED_CASES["gqa"], transfer="direct"), 0),
    "sparse-bundled-c8 checksums": (Deployment(NAMED_CASES["sparse-bundled-c8"], integrity="on"), 0),
}


def groups(deployment: Deployment) -> list[int]:
    """The deployment's KV cache groups."""
    return sorted({entry.group for entry in cache_spec(deployment.case, deployment.tp_size, 0).entries})


def expected_pages(deployment: Deployment, rank: int, group: int = 0) -> list[bytes]:
    """The oracle: entries as registered, tensors in order, a second look at the same bytes left out."""
    spec = cache_spec(deployment.case, deployment.tp_size, rank)
    caches = allocate(spec, 1)
    parts = max(deployment.dcp_size, deployment.case.indexer_copies)
    part = f"{rank % parts} of {parts}" if parts > 1 else ""
    return [
        page_content(place, content_name(entry.layer_name), CONTENT, part).tobytes()
        for entry in spec.entries
        if entry.same_as is None and entry.group == group
        for place in caches.places[entry.layer_name]
        if not place.alias
    ]


def expected_object(deployment: Deployment, rank: int, group: int = 0) -> bytes:
    """The pages, one after the other, then a checksum of each where there are any."""
    pages = expected_pages(deployment, rank, group)
    checksums = [] if deployment.integrity == "off" else [xxhash.xxh3_64_digest(page) for page in pages]
    return b"".join([*pages, *checksums])


def stored_objects(target: SimulatorTarget, deployment: Deployment, rank: int) -> list[tuple[str, bytes]]:
    """By group the key and the bytes that the connector stores. Ranks that share the writing are all asked."""
    for writer in range(deployment.tp_size):
        with target.node(deployment, writer) as node:
            node.fill({BLOCK: CONTENT})
            node.save({BLOCK: CONTENT})
    objects = []
    for group in groups(deployment):
        key = target.key(deployment, rank, CONTENT, group)
        found = target.peek(key)
        assert found is not None, f"{deployment}: nothing is stored under {key}"
        objects.append((key, found))
    return objects


def vector_name(name: str, group: int) -> str:
    """The first group's vector has the deployment's name alone."""
    return f"{name} group {group}" if group else name


def vector(key: str, value: bytes) -> dict[str, Any]:
    """What is kept of an object."""
    return {"key": key, "bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}


def main() -> None:
    """Write the vectors."""
    vectors = {}
    for name, (deployment, rank) in DEPLOYMENTS.items():
        with simulator(64 << 20) as target:
            for group, (key, _) in enumerate(stored_objects(target, deployment, rank)):
                vectors[vector_name(name, group)] = vector(key, expected_object(deployment, rank, group))
    PATH.write_text(json.dumps({"format_version": FORMAT_VERSION, "vectors": vectors}, indent=1) + "\n")


if __name__ == "__main__":
    main()
