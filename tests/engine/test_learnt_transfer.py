"""An engine whose store prefers its own segment looks at both ways of transfer, and answers as without a pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import assert_fills_and_answers_from, num_objects
from tests.engine.engine import engine
from tests.engine.models import BLOCK_SIZE, KINDS
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.targets.real_mooncake import RealMaster


@pytest.mark.parametrize("kind", KINDS)
def test_own_memory_is_learnt_about(
    spec: Callable[..., EngineSpec],
    baseline: Callable[[str], list[Answer]],
    master: RealMaster,
    tmp_path: Path,
    kind: str,
) -> None:
    own = write_mooncake_json(
        tmp_path / "mooncake.json", master.address, preferred_segment=True, global_segment_size="64MB"
    )
    with engine(spec(kind, f"own-{kind}", mooncake_json=own)) as one:
        assert_fills_and_answers_from(one, baseline(kind), num_objects(kind, BLOCK_SIZE[kind]))
        tried = one.perform("transfer_trials")
        assert tried and all(saves and loads for saves, loads in tried), f"not both ways were tried: {tried}"


def test_memory_of_others_is_moved_packed(spec: Callable[..., EngineSpec]) -> None:
    with engine(spec("gqa", "others")) as one:
        assert one.perform("transfer_trials") == []
