"""Connectors with one mistake each are found."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.cluster.breakages import BREAKAGES, FOUND_AT
from tests.cluster.cluster import run
from tests.cluster.scenario import scenario

NUM_SEEDS = 50


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Broken connectors have much to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(600)
@pytest.mark.kvpool_teeth("wrong connectors in the cluster")
@pytest.mark.parametrize("mistake", BREAKAGES)
def test_the_mistake_is_found_within_50_seeds(mistake: str) -> None:
    first = FOUND_AT.get(mistake, 0)
    with BREAKAGES[mistake]():
        for seed in (first, *(seed for seed in range(NUM_SEEDS) if seed != first)):
            if found := run(scenario(seed, "swarm")).violations:
                # A mistake that cannot even be called shows nothing of what is looked for.
                assert not any("breakages.py" in text for text in found), found
                return
    raise AssertionError(f"not found within {NUM_SEEDS} seeds: {mistake}")


def test_there_are_enough() -> None:
    assert len(BREAKAGES) >= 18
    assert FOUND_AT.keys() <= BREAKAGES.keys()
