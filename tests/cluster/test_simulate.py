"""The simulated cluster itself: runs are repeatable, right connectors pass."""

from __future__ import annotations

import pytest

from tests.cluster.cluster import run
from tests.cluster.scenario import scenario


@pytest.mark.parametrize("seed", range(3))
def test_without_faults_all_is_well_and_the_pool_is_used(seed: int) -> None:
    outcome = run(scenario(seed, "lite"))
    assert outcome.violations == []
    assert outcome.num_loads > 50
    assert outcome.num_audited > 50
    assert outcome.num_rows > 10_000


@pytest.mark.parametrize(("seed", "profile"), [(1, "lite"), (1, "swarm"), (2, "swarm")])
def test_a_seed_decides_everything(seed: int, profile: str) -> None:
    first, second = (run(scenario(seed, profile)) for _ in range(2))
    assert first == second
