"""Objects and keys are what they were: the golden vectors hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpool_connector.contract import descriptor
from tests.conformance.vectors import (
    CONTENT,
    DEPLOYMENTS,
    PATH,
    expected_object,
    groups,
    stored_objects,
    vector,
    vector_name,
)
from tests.targets.simulator import SimulatorTarget, simulator

GOLDEN = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.fixture
def target() -> Iterator[SimulatorTarget]:
    with simulator(64 << 20) as made:
        yield made


def test_the_vectors_are_of_this_format() -> None:
    assert GOLDEN["format_version"] == descriptor.FORMAT_VERSION
    names = {vector_name(name, group) for name, (deployment, _) in DEPLOYMENTS.items() for group in groups(deployment)}
    assert set(GOLDEN["vectors"]) == names


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_stored_objects_are_the_golden_ones(target: SimulatorTarget, name: str) -> None:
    deployment, rank = DEPLOYMENTS[name]
    for group, (key, value) in enumerate(stored_objects(target, deployment, rank)):
        assert vector(key, value) == GOLDEN["vectors"][vector_name(name, group)]
        same = value == expected_object(deployment, rank, group)
        assert same


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_heads_stored_by_themselves_are_the_golden_objects_of_as_many_ranks_as_heads(
    target: SimulatorTarget, tp_size: int
) -> None:
    """Eight ranks hold a head each: whoever splits by heads stores what they always stored, under the same keys."""
    deployment = replace(DEPLOYMENTS["mha tp8 rank7"][0], tp_size=tp_size, kv_head_split="head")
    stored_objects(target, deployment, tp_size - 1)
    key = target.key(deployment, tp_size - 1, CONTENT, part=8 // tp_size - 1)
    value = target.peek(key)
    assert value is not None
    assert vector(key, value) == GOLDEN["vectors"]["mha tp8 rank7"]


def test_another_format_is_noticed(target: SimulatorTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    right = descriptor.Descriptor.to_json
    monkeypatch.setattr(descriptor.Descriptor, "to_json", lambda self: right(self) + " ")
    deployment, rank = DEPLOYMENTS["gqa"]
    ((key, value),) = stored_objects(target, deployment, rank)
    assert vector(key, value) != GOLDEN["vectors"]["gqa"]
