"""The simulated engine in real time, as the benchmark of layers uses it: it loads, and it sees wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.layered_models import MODEL_WAYS
from bench.real_time import EngineBench

import kvpool_simulator.store
from kvpool_connector.config import StoreSettings
from kvpool_connector.host import HostCopier
from kvpool_connector.mooncake import MooncakeStore
from kvpool_simulator.device import rank_spec
from tests.cluster.deployed import pool

NUM_BLOCKS = 3


@pytest.fixture
def store() -> Iterator[MooncakeStore]:
    """A client of a simulated pool."""
    with pool() as master:
        settings = StoreSettings(
            master_server_address=master.address, protocol="tcp", global_segment_size=0, local_buffer_size=0
        )
        made = MooncakeStore(settings, module=kvpool_simulator.store)
        made.connect()
        yield made
        made.close()


@pytest.mark.parametrize("way", MODEL_WAYS)
def test_a_prompt_is_saved_and_loaded(store: MooncakeStore, way: str) -> None:
    bench = EngineBench(store, rank_spec("tiny-deepseek-v3.2"), 16, NUM_BLOCKS, MODEL_WAYS[way])
    for turn in range(2):
        bench.save(turn, 0.0)
        assert bench.load(turn, 0.0) > 0
        bench.forget()
        with pytest.raises(AssertionError, match="nothing was checked"):
            bench.load(turn, 0.0)
        # What was not there was computed, and is saved.
        assert bench._worker.drain(60)
        bench._worker.counters.take()
        bench.forget()
    bench.close()


@pytest.mark.parametrize("way", ["packed", "layers"])
def test_what_did_not_land_is_seen(store: MooncakeStore, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EngineBench(store, rank_spec("tiny-deepseek-v3.2"), 16, NUM_BLOCKS, MODEL_WAYS[way])
    bench.save(0, 0.0)
    monkeypatch.setattr(HostCopier, "scatter", lambda self, block_ids, address: None)
    with pytest.raises(AssertionError, match="wrong KV was used"):
        bench.load(0, 0.0)
    bench.close()
