"""Beside another connector under vLLM's `MultiConnector`, as its first child and as its second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.conftest import assert_same, loads, num_objects
from tests.engine.engine import engine
from tests.engine.models import BLOCK_SIZE
from tests.engine.prompts import PROMPTS, poolable, unseen
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

BYSTANDER = {"kv_connector": "Bystander", "kv_connector_module_path": "tests.engine.bystander", "kv_role": "kv_both"}
FIRST = [[1, 2, 3]]
KINDS, PLACES = ("gqa", "two-groups"), ("first", "second")


def beside(made: EngineSpec, children: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> EngineSpec:
    """The same engine with its connector among the `children`."""
    own = made.transfer_config()
    assert own is not None
    return replace(made, connector="MultiConnector", module=None, pool={"connectors": children(own)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_beside_another(
    filled: Callable[[str], EngineSpec], baseline: Callable[[str], list[Answer]], place: str, kind: str
) -> None:
    others = unseen(f"{place} {kind}")
    made = beside(filled(kind), lambda own: [own, BYSTANDER] if place == "first" else [BYSTANDER, own])
    with engine(made) as running:
        assert running.perform("evicts_from_the_engines_cache")
        # The other's handshake may hide ours; the first step brings it.
        running.generate(FIRST)
        answers = running.generate(PROMPTS)
        assert_same(answers, baseline(kind))
        assert [answer.num_cached_tokens for answer in answers] == poolable(BLOCK_SIZE[kind])
        assert loads(running.counts()) == {"load_blocks_ok": num_objects(kind, BLOCK_SIZE[kind])}
        expected = running.generate(others)
    # What was saved through the parent is there for the next engine.
    with engine(made) as running:
        running.generate(FIRST)
        answers = running.generate(others)
        assert_same(answers, expected)
        assert [answer.num_cached_tokens for answer in answers] == poolable(BLOCK_SIZE[kind])


def test_two_of_ours_with_a_namespace_each(
    filled: Callable[[str], EngineSpec], baseline: Callable[[str], list[Answer]]
) -> None:
    made = beside(filled("gqa"), lambda own: [{**own, "kv_connector_extra_config": {"namespace": "empty"}}, own])
    with engine(made) as running:
        running.generate(FIRST)
        # What the first does not have the second has, and the first saves it.
        for _ in range(2):
            answers = running.generate(PROMPTS)
            assert_same(answers, baseline("gqa"))
            assert [answer.num_cached_tokens for answer in answers] == poolable(BLOCK_SIZE["gqa"])
            running.forget()
