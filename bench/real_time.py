"""The simulated engine in real time over a real store: what a user waits for while the device's computing takes a given
time.

The engine, its scheduler, its device's stream and the connector's two sides are those of the simulated cluster. Time is
the machine's, threads run as they like, and a layer's computing is queued on the stream and lands when its time is
over, so that a core is free for the transfer as it is beside an NPU. Of every block the first token's row is checked in
three of the caches when their layer is computed: to look at every byte, as the cluster does, would take longer than
what is measured.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.clock import MonotonicClock
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.shards import ShardMap
from kvpool_connector.contract.topology import Rank as Coordinates
from kvpool_connector.contract.topology import Topology
from kvpool_connector.events import BlockEvents
from kvpool_connector.lookup import StoreLookup
from kvpool_connector.outage import Outage
from kvpool_connector.registration import GroupSpec
from kvpool_connector.scheduler import PoolScheduler
from kvpool_connector.tracker import GroupRule
from kvpool_connector.worker import PoolWorker
from kvpool_simulator.device import Caches, Event, Stream, allocate
from kvpool_simulator.device.arena import POISON
from kvpool_simulator.device.spec import CacheSpec
from kvpool_simulator.engine import Engine, Faults, Group, Limits, Order, Rank, RankMemory, Scheduler, Timing, Wish
from kvpool_simulator.engine.oracle import Keys, Rows
from kvpool_simulator.engine.scheduler import Step
from kvpool_simulator.engine.sides import ConnectorOutput
from kvpool_simulator.engine.tasks import Task
from tests.cluster.device import SimulatedDevice
from tests.cluster.sides import PoolSchedulerSide, PoolWorkerSide
from tests.targets.borrowed import Borrowed

LOOK_S = 0.0001
"""How often the end of a step is looked for. Looking without a sleep would take a core from the transfer."""
LIMIT_S = 120.0


class RealTime:
    """Has the methods of `kvpool_simulator.engine.Tasks` that an engine of one rank needs."""

    def __init__(self) -> None:
        self.clock = MonotonicClock()

    def stream(self) -> Stream:
        """A device's queue of work, which lands when somebody looks after its time is over."""
        return Stream(self.clock, time.sleep)

    def spawn(self, name: str, run: Callable[[], object]) -> Task:
        """Nothing runs: the only rank's hooks are called by the engine itself."""
        return Task(name)

    def wait(self, ready: Callable[[], bool], timeout_s: float = LIMIT_S) -> bool:
        """Look until `ready()`; False after `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
        return True

    def sleep(self, seconds: float) -> None:
        """Let real time pass: what is measured goes on meanwhile."""
        time.sleep(seconds)

    def pause(self) -> None:
        """Other threads go on at any time."""


class SampledMemory(RankMemory):
    """Knows the first token of every block in the first, the middle and the last of the caches, to be quick."""

    def __init__(self, caches: Caches) -> None:
        super().__init__(caches)
        self.pages = [component for components in self.layers.values() for component in components]
        """Of all layers."""
        names = list(self.layers)
        known = {names[0], names[len(names) // 2], names[-1]}
        self.layers = {name: components if name in known else [] for name, components in self.layers.items()}

    def rows(self, keys: Keys, table: Sequence[int], block_size: int, start: int, *, state: bool = False) -> Rows:
        """See `RankMemory.rows`."""
        found = super().rows(keys, table, block_size, start, state=state)
        first = found.rows_at == 0
        return Rows(found.keys[first], found.block_ids[first], found.rows_at[first])


class TimedScheduler(Scheduler):
    """Notes when a token was known last."""

    token_at = 0.0
    """In seconds of `time.perf_counter`."""

    def update(self, step: Step, connector_output: ConnectorOutput) -> None:
        """See `Scheduler.update`."""
        super().update(step, connector_output)
        if step.parts:
            self.token_at = time.perf_counter()


class RealTimeEngine(Engine):
    """An engine of one rank, whose worker runs in the engine's own process and thread."""

    def _on_ranks(self, job: Callable[[Rank], None]) -> None:
        for rank in self.ranks:
            job(rank)


class EngineBench:
    """One rank's caches under an engine, by one way of transfer. A prompt is saved once, and then loaded."""

    def __init__(self, store: Any, spec: CacheSpec, block_size: int, num_blocks: int, settings: dict[str, Any]) -> None:
        """`num_blocks`: of a prompt. `store` stays open. Content is kept apart from that of all others."""
        self._store, self._num_blocks, self._block_size = store, num_blocks, block_size
        tasks, topology = RealTime(), Topology(1)
        chosen = PoolSettings.model_validate({"load_timeout_s": LIMIT_S, "namespace": uuid.uuid4().hex, **settings})
        # A block for the token after the prompt, and the one that is nobody's.
        caches = allocate(spec, num_blocks + 2)
        self._memory = SampledMemory(caches)
        names = tuple(self._memory.layers)
        engine: RealTimeEngine | None = None

        def record() -> Event:
            assert engine is not None
            return engine.record_event()

        self._worker = worker = PoolWorker(
            chosen,
            Borrowed(store),
            SimulatedDevice(tasks, record, Faults(0, {})),
            topology,
            Coordinates(),
            ModelIdentity("measured"),
        )
        announced = worker.register(caches.kv_caches, [GroupSpec(names, block_size, caches.num_blocks, kind="latent")])
        lookup = StoreLookup(Borrowed(store), Outage(tasks.clock, chosen.outage_pause_s), chosen.lookup_timeout_s)
        pool = PoolScheduler([GroupRule(block_size)], block_size, lookup)
        side = PoolSchedulerSide(pool, ShardMap(topology, [announced]), BlockEvents(), lambda shards, told: None)
        groups = [Group(names, block_size)]
        # What the engine would find itself would not be loaded.
        limits = Limits(caches.num_blocks, max_batched_tokens=(num_blocks + 1) * block_size, caching=False)
        self._scheduler = TimedScheduler(groups, limits, side, block_size, lambda request, position: 0)
        # vLLM calls the hooks of layers in any case.
        rank = Rank(self._memory, PoolWorkerSide(worker, Order.V0_32, 1, layerwise=True))
        engine = RealTimeEngine("measured", tasks, self._scheduler, groups, [rank], Timing(host_s=0.0))
        engine.stop()
        self._engine = engine

    @property
    def object_bytes(self) -> int:
        """Bytes of one block."""
        return sum(component.view[0].nbytes for component in self._memory.pages)

    def save(self, turn: int, computing_s: float) -> tuple[float, float]:
        """Seconds until a new prompt's first token, and until all of its blocks are in the pool."""
        start, token_s = self._run(turn, 0, computing_s)
        assert self._worker.drain(LIMIT_S)
        took = time.perf_counter() - start
        self._expect(save_blocks_stored=self._num_blocks)
        return token_s, took

    def load(self, turn: int, computing_s: float) -> float:
        """Seconds until the first token of a prompt whose blocks are in the pool, with one token more."""
        for component in self._memory.pages:
            component.view[:] = POISON
        _, token_s = self._run(turn, 1, computing_s)
        self._expect(load_blocks_ok=self._num_blocks)
        return token_s

    def forget(self) -> None:
        """Take the prompt that was loaded last out of the pool."""
        hashes = self._scheduler.ended[-1].block_hashes[: self._num_blocks]
        for shard in self._worker._part.shards:
            self._store.remove(shard.keys(hashes, ""), force=True)

    def _run(self, turn: int, num_more: int, computing_s: float) -> tuple[float, float]:
        self._engine.timing = replace(self._engine.timing, layer_s=computing_s / len(self._memory.layers))
        tokens = tuple(turn * 7919 % 50021 + i for i in range(self._num_blocks * self._block_size + num_more))
        # Hashing the prompt is the same for all ways, and with vLLM it is done in another process.
        self._scheduler.add(Wish(f"{turn}-{num_more}", tokens, 1))
        checked = self._engine.num_rows_checked
        start = time.perf_counter()
        self._engine.run()
        assert not self._scheduler.violations, self._scheduler.violations
        if num_more:
            assert self._engine.num_rows_checked > checked, "nothing was checked"
        return start, self._scheduler.token_at - start

    def _expect(self, **expected: int) -> None:
        counts = self._worker.counters.take()
        assert {name: counts.get(name) for name in expected} == expected, f"expected {expected}: found {counts}"

    def close(self) -> None:
        """End both sides; the store stays."""
        self._scheduler.connector.shutdown()
        self._worker.close()
