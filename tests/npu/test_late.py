"""A worker on the stand-in whose device is late: what it may report, hand out again and let the engine reuse."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_connector.config import StoreSettings
from kvpool_connector.metadata import LoadJob, StepMetadata
from kvpool_connector.mooncake import MooncakeStore
from kvpool_connector.staging import Staging
from kvpool_simulator.npu import Machine, Transport
from kvpool_simulator.store import SimulatedMaster
from tests.npu.edge import SOURCE
from tests.targets.memory import NpuMemory
from tests.targets.node import LocalNode

CONTENTS = {1: "one", 7: "seven", 2: "two"}


def same(source: str) -> str:
    return source


class World:
    """A node on a stand-in that does its work when asked once, and waits for none."""

    def __init__(self, master: SimulatedMaster, change: Callable[[str], str], way: str, integrity: str) -> None:
        """`change`: of the source of `ascend.py`. `way`: `packed` or `layerwise`."""
        self.machine = Machine(num_devices=1)
        self.machine.clock.queries_until_landed = 0
        module = self.machine.load(SOURCE, change)
        self.device = module.AscendDevice(0, limit_s=0)
        settings = StoreSettings(
            master_server_address=master.address,
            protocol="ascend",
            local_hostname="127.0.0.1",
            global_segment_size=64 << 20,
            local_buffer_size=16 << 20,
        )
        store = MooncakeStore(settings, module=Transport(self.machine), bind_thread=self.device.bind_thread)
        store.connect()
        self.memory = NpuMemory(self.machine.torch, self.device, "npu:0")
        deployment = Deployment(NAMED_CASES["gqa"], transfer=way, integrity=integrity)
        self.node = LocalNode(deployment, 0, store, memory=self.memory)
        self.worker = self.node._worker

    def hang(self, hangs: bool) -> None:
        """All streams but the engine's."""
        for stream in self.machine.streams:
            stream.hangs = hangs

    def lent(self) -> set[int]:
        """The chunks of staging that are to be had."""
        staging = self.worker._staging
        assert isinstance(staging, Staging)
        found: list[int] = []

        def lend() -> None:
            with staging.chunk(0) as address:
                if address is not None:
                    found.append(address)
                    lend()

        lend()
        return set(found)


def a_late_load(change: Callable[[str], str], way: str = "packed", integrity: str = "off") -> None:
    """A load whose copies into the cache hang has failed; its blocks are the engine's, its staging nobody's."""
    with SimulatedMaster() as master:
        world = World(master, change, way, integrity)
        node, worker = world.node, world.worker
        node.fill(CONTENTS)
        assert node.save(CONTENTS) == 3
        node.poison()
        all_chunks = world.lent()
        assert len(all_chunks) >= 3
        step = StepMetadata(loads=(LoadJob("request", node._blocks(CONTENTS)),))
        world.hang(True)
        worker.begin_step(step)
        worker.start_loads(step)
        for layer in node._hooked():
            worker.wait_layer(layer)
        worker.end_step(step)
        failed = worker.take_failed_blocks()
        assert failed == set(CONTENTS), f"blocks {set(CONTENTS) - failed} were said to be loaded"
        counts = node.counts()
        assert counts.get("load_blocks_device_late") == 3, counts
        assert not counts.get("load_blocks_ok")
        assert len(world.lent()) < len(all_chunks), "staging that the device may still write was handed out"
        # The engine takes the blocks for others.
        worker.begin_step(StepMetadata())
        twins = [twin for _, twin in world.memory._twins.values()]
        for twin in twins:
            twin.fill_(7)
        world.hang(False)
        world.machine.default_stream(0).synchronize()
        for stream in world.machine.streams:
            stream.synchronize()
        assert all(twin.memory.eq(7).all() for twin in twins), "the late copy came over what the engine has written"
        assert world.lent() == all_chunks, "staging was not handed out again after the late work had landed"
        assert node.load(CONTENTS) == set()
        assert node.mismatches(CONTENTS) == []
        node.close()


def a_late_save(change: Callable[[str], str], way: str = "packed", integrity: str = "off") -> None:
    """A save whose copies out of the cache hang stores nothing; the worker ends, and a later save is whole."""
    with SimulatedMaster() as master:
        world = World(master, change, way, integrity)
        node = world.node
        node.fill(CONTENTS)
        all_chunks = world.lent()
        world.hang(True)
        assert node.save(CONTENTS) == 0
        counts = node.counts()
        assert counts.get("save_blocks_dropped_device_late") == 3, counts
        assert node.hits(["one"]) == 0
        assert len(world.lent()) < len(all_chunks), "staging that the device may still write was handed out"
        world.hang(False)
        node.fill(CONTENTS)
        assert node.save(CONTENTS) == 3
        assert world.lent() == all_chunks
        node.poison()
        assert node.load(CONTENTS) == set()
        assert node.mismatches(CONTENTS) == []
        node.close()


PLANTED = {
    "no limit": ("event.wait(self._limit_s)", "(self._stream.synchronize() or True)"),
    "staging is handed out early": (
        "raise DeviceLateError(self._limit_s, event)",
        "raise DeviceLateError(self._limit_s, None)",
    ),
    "reported as good": ("                    raise DeviceLateError(self._limit_s, event)\n", ""),
}
"""A mistake in `ascend.py`: what it replaces, and by what."""
OF_LOADS = {
    "a late copy is not known": ("late_writes.add(event)", "pass"),
    "late copies are put in no order": ("        self._late_writes.order()", "        return"),
}


def planted(mistake: str) -> Callable[[str], str]:
    old, new = (PLANTED | OF_LOADS)[mistake]

    def change(source: str) -> str:
        assert old in source, f"what {mistake!r} replaces is not in the source any more"
        return source.replace(old, new)

    return change


@pytest.mark.parametrize("integrity", ["off", "on"])
@pytest.mark.parametrize("way", ["packed", "layerwise"])
def test_a5_a_late_load_has_failed_and_harms_nobody(way: str, integrity: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        a_late_load(same, way, integrity)
    assert "event=device_late limit_s=0 blocks=3: the device did not finish" in caplog.text
    assert "event=device_landed" in caplog.text
    assert "event=store_outage" not in caplog.text


@pytest.mark.parametrize("integrity", ["off", "on"])
@pytest.mark.parametrize("way", ["packed", "layerwise"])
def test_a5_a_late_save_stores_nothing(way: str, integrity: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        a_late_save(same, way, integrity)
    assert "event=device_late limit_s=0 blocks=3: the device did not finish" in caplog.text
    assert "event=store_outage" not in caplog.text


@pytest.mark.parametrize("way", ["packed", "layerwise"])
@pytest.mark.parametrize("mistake", PLANTED | OF_LOADS)
def test_a_planted_mistake_of_loads_is_found(mistake: str, way: str) -> None:
    with pytest.raises(AssertionError):
        a_late_load(planted(mistake), way)


@pytest.mark.parametrize("way", ["packed", "layerwise"])
@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_of_saves_is_found(mistake: str, way: str) -> None:
    with pytest.raises(AssertionError):
        a_late_save(planted(mistake), way)
