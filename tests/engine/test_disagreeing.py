"""Two real workers that disagree: refused before serving, in words, and below a parent as soon as it can be known."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.engine.conftest import assert_same
from tests.engine.engine import EngineError, engine
from tests.engine.prompts import PROMPTS
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec
from tests.engine.test_multi import BYSTANDER, beside

MODULE = "tests.engine.disagreeing"
FIRST, SECOND = "Rank(pp=0, pcp=0, tp=0)", "Rank(pp=0, pcp=0, tp=1)"
REMEDY = "Give every worker the same model, versions of vLLM and vLLM-Ascend, and configuration"
DISAGREE = f"{FIRST} and {SECOND} disagree about KV cache group 0"
COMPONENT = f"{DISAGREE}, layer '2', component 'kv'"
TOLD = {
    "OtherDtype": f"{COMPONENT}: dtype is 'float32' on the first and 'int32' on the second. {REMEDY}",
    "OtherShape": f"{COMPONENT}: page_shape is (1, 32, 128) on the first and (1, 32, 64) on the second. {REMEDY}",
    "OtherSettings": f"{DISAGREE}: checksum is 'xxh3-64' on the first and '' on the second. {REMEDY}",
    "OtherNamespace": f"{FIRST} uses namespace 'disagree OtherNamespace' but {SECOND} uses 'elsewhere'; give every",
}


def disagreeing(spec: Callable[..., EngineSpec], name: str) -> EngineSpec:
    made = spec("gqa", f"disagree {name}", {"integrity": "on"}, tensor_parallel_size=2)
    return replace(made, connector=name, module=MODULE)


@pytest.mark.parametrize("name", TOLD)
def test_ranks_that_disagree_are_refused_at_the_handshake(spec: Callable[..., EngineSpec], name: str) -> None:
    with pytest.raises(EngineError, match=re.escape(TOLD[name])), engine(disagreeing(spec, name)):
        pass


def test_as_the_first_child_of_a_parent_they_are_refused_too(spec: Callable[..., EngineSpec]) -> None:
    made = beside(disagreeing(spec, "OtherShape"), lambda own: [own, BYSTANDER])
    with pytest.raises(EngineError, match=re.escape(TOLD["OtherShape"])), engine(made):
        pass


def test_what_another_child_hides_at_the_handshake_is_refused_after_the_first_step(
    spec: Callable[..., EngineSpec], baseline: Callable[[str], list[Answer]]
) -> None:
    """No request fails, and nothing is saved or loaded."""
    made = beside(disagreeing(spec, "OtherShape"), lambda own: [BYSTANDER, own])
    with engine(made) as running:
        for _ in range(2):
            assert_same(running.generate(PROMPTS), baseline("gqa"))
        counts = running.counts()
        assert not [name for name in counts if name.startswith(("load_", "save_"))], counts
        said = running.printed()
    assert f"event=ranks_disagree: {TOLD['OtherShape']}" in said
    assert said.count("event=ranks_disagree") == 1
    assert "event=no_handshake" not in said
