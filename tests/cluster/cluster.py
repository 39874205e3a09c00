"""Engines and a store, made from a scenario, run to the end, and judged."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.queues import SimpleQueue
from random import Random

from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.contract.clock import Clock
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.shards import RankShards, ShardMap
from kvpool_connector.events import BlockEvents
from kvpool_connector.lookup import StoreLookup
from kvpool_connector.mooncake import MooncakeStore
from kvpool_connector.outage import Outage
from kvpool_connector.scheduler import PoolScheduler
from kvpool_connector.worker import PoolWorker
from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.device import Event
from kvpool_simulator.engine import Engine, Faults, Rank, Request, Scheduler, Tasks, controlled, faulty_store
from kvpool_simulator.engine.workload import Users
from kvpool_simulator.store import MasterOptions, MooncakeDistributedStore, ReplicateConfig, SimulatedMaster
from kvpool_simulator.store.segment import Owner
from tests.cluster.audit import audit
from tests.cluster.device import SimulatedDevice
from tests.cluster.ranks import groups_of, memory_of, registered_groups, rule_of, topology_of
from tests.cluster.scenario import Scenario, scenario
from tests.cluster.sides import PoolSchedulerSide, PoolWorkerSide
from tests.cluster.told import Told

SEGMENT_BYTES = 16 << 20
PIECE_BYTES = 16_384
PLENTY_BYTES = 1 << 30
END_LIMIT_S = 3600.0
"""Virtual seconds within which all must end once nothing fails any more."""
_ports = itertools.count(10_000)


@dataclass
class Outcome:
    """What a run came to."""

    scenario: Scenario
    violations: list[str] = field(default_factory=list)
    num_loads: int = 0
    """Block loads over all ranks, each checked byte by byte."""
    num_rows: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_audited: int = 0
    num_missing: int = 0
    """Full blocks of prompts that were computed and are not in the pool (looked at where nothing was refused)."""
    longest_hook_s: dict[str, float] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    num_resets: int = 0

    @property
    def replay(self) -> str:
        """The one line that shows it again."""
        return f"nox -s simulate -- --seed {self.scenario.seed} --profile {self.scenario.profile}"


class Cluster:
    """All that a scenario has; `run` is its life."""

    def __init__(self, scenario: Scenario, tasks: Tasks, master: SimulatedMaster) -> None:
        self.scenario = scenario
        self.tasks = tasks
        self.master = master
        self.outcome = Outcome(scenario)
        self.faults = Faults(scenario.seed, scenario.rates)
        self.faults.lift()
        self.random = Random(f"cluster/{scenario.seed}")
        self._latencies = Random(f"latency/{scenario.seed}")
        self._module = faulty_store(tasks, self.faults, self._latency, 30.0)
        self.owner = self._new_owner()
        self.told = Told(
            master,
            keeps_all=self._keeps_all,
            tells_all=scenario.num_engines == 1 or not scenario.settings.get("use_layerwise"),
        )
        self.engines = [self._engine(i) for i in range(scenario.num_engines)]

    def _latency(self) -> float:
        longest = self.scenario.latency_s
        return self._latencies.choice((0.0, longest * self._latencies.random(), longest))

    def _new_owner(self) -> MooncakeDistributedStore:
        """Memory for the pool, of which a ballast may leave little."""
        owner = MooncakeDistributedStore()
        full = self.scenario.spare_objects is not None
        size = SEGMENT_BYTES if full else PLENTY_BYTES
        assert owner.setup("owner", "P2PHANDSHAKE", size, 0, "tcp", "", self.master.address) == 0
        if full:
            # In pieces: a single large one would take the whole segment, as sizes are rounded up.
            number = SEGMENT_BYTES // PIECE_BYTES - (self.scenario.spare_objects or 0)
            keys = [f"ballast-{owner._client}-{index}" for index in range(number)]
            store = self.master.service.master
            pinned = ReplicateConfig()
            pinned.with_hard_pin = True
            started = store.put_start(keys, [PIECE_BYTES] * number, owner._client, pinned)
            assert {code for code, _ in started} == {0}
            store.put_end(keys, owner._client)
        return owner

    def _store(self, settings: PoolSettings) -> MooncakeStore:
        store = MooncakeStore(
            StoreSettings(
                master_server_address=self.master.address, protocol="tcp", global_segment_size=0, local_buffer_size=0
            ),
            settings,
            module=self._module,
        )
        store.connect()
        return store

    def _engine(self, number: int) -> Engine:
        scenario = self.scenario
        is_consumer = scenario.consumer is not None and number == scenario.num_engines - 1
        shape = scenario.consumer if is_consumer and scenario.consumer else scenario.shape
        name = f"engine-{number}"
        topology, groups = topology_of(shape), groups_of(shape)
        settings = PoolSettings.model_validate({"staging_bytes": 4 << 20, **scenario.settings})
        clock: Clock = self.tasks.clock
        hash_block_size = math.gcd(*(group.tokens for group in groups))
        engine: Engine | None = None

        def record() -> Event:
            assert engine is not None
            return engine.record_event()

        ranks: list[Rank] = []
        announced: list[RankShards] = []
        for coordinates in topology.ranks():
            memory = memory_of(shape, topology, coordinates, scenario.limits.num_blocks)
            device = SimulatedDevice(self.tasks, record, self.faults)
            worker = PoolWorker(
                settings,
                self._store(settings),
                device,
                topology,
                coordinates,
                ModelIdentity(shape.model),
                clock,
                reports_stored=True,
            )
            announced.append(worker.register(memory.caches.kv_caches, registered_groups(shape, memory.caches)))
            ranks.append(
                Rank(memory, PoolWorkerSide(worker, scenario.limits.order, len(groups), settings.use_layerwise))
            )
        rules = [rule_of(group) for group in groups]
        outage = Outage(clock, settings.outage_pause_s)
        lookup = StoreLookup(self._store(settings), outage, settings.lookup_timeout_s)
        events = BlockEvents()
        pool = PoolScheduler(
            rules,
            hash_block_size,
            lookup,
            loads=scenario.consumer is None or is_consumer,
            saves=not is_consumer,
            load_between_steps=settings.load_async,
            save_decode_cache=settings.save_decode_cache,
            clock=clock,
            events=events,
        )
        side = PoolSchedulerSide(pool, ShardMap(topology, announced), events, self.told.hear)
        guesses = Random(f"guesses/{scenario.seed}/{name}")
        chances: dict[tuple[str, int], int] = {}

        def accepts(request: Request, position: int) -> int:
            return chances.setdefault((request.request_id, position), guesses.randint(0, 3))

        scheduler = Scheduler(groups, scenario.limits, side, hash_block_size, accepts)
        engine = Engine(name, self.tasks, scheduler, groups, ranks, scenario.timing, self._slow)
        return engine

    def _slow(self, rank: int) -> float:
        return self.faults.stream("slow-how").uniform(0.0, 1.0) if self.faults.strikes("slow") else 0.0

    # Life

    def run(self) -> None:
        """Users come while faults last; then all must end."""
        self.faults.lifted = False
        for engine in self.engines:
            engine.start()
        events = self.tasks.spawn("events", self._events)
        users = [self.tasks.spawn(f"users-{engine.name}", lambda e=engine: self._users(e)) for engine in self.engines]
        for task in users:
            self.tasks.join(task)
        self.tasks.join(events)
        for engine in self.engines:
            engine.stop()

        def ended() -> bool:
            return all(engine.ended for engine in self.engines)

        self.tasks.wait(ended, self.random.choice((0.0, 1.0, 60.0)))
        self.faults.lift()
        if not self.tasks.wait(ended, END_LIMIT_S):
            for engine in self.engines:
                left = {r.request_id: r.status.name for r in engine.scheduler.requests.values()}
                self._violation(f"{engine.name} did not end: {left}")
            return
        self._judge()

    def _users(self, engine: Engine) -> None:
        scenario = self.scenario
        random = Random(f"users/{scenario.seed}/{engine.name}")
        for wish in Users(random, scenario.mix, f"{engine.name}-").wishes(scenario.num_requests):
            engine.add(wish)
            self.outcome.num_requests += 1
            if random.random() < scenario.mix.aborts:
                after = random.uniform(
                    0.0, 5 * (scenario.arrival_s + scenario.timing.layer_s * 10 + scenario.latency_s)
                )
                self.tasks.spawn("abort", lambda w=wish, s=after: (self.tasks.sleep(s), engine.abort(w.request_id)))
            if scenario.arrival_s:
                self.tasks.sleep(random.expovariate(1 / scenario.arrival_s))

    def _events(self) -> None:
        """The store's troubles, one after the other."""
        for event in self.scenario.events:
            self.tasks.sleep(self.random.uniform(0.0, 0.5))
            lasts = self.random.choice((0.01, 0.3, 6.0))
            self.outcome.faults[event] += 1
            if event in ("kill", "restart"):
                self.master.kill()
                self.tasks.sleep(lasts)
                (self.master.restart if event == "restart" else self.master.resume)()
            elif event == "reset":
                for engine in self.engines:
                    engine.reset()
            elif event == "hang":
                self.master.hang()
                self.tasks.sleep(lasts)
                self.master.resume()
            else:
                self.master.service.master.set_owner(self.owner._client, Owner.DEAD)
                self.tasks.sleep(lasts)
                self.master.service.master.unmount(self.owner._client)
                self.owner = self._new_owner()

    def _violation(self, text: str) -> None:
        self.outcome.violations.append(text)

    def _judge(self) -> None:
        for engine in self.engines:
            scheduler = engine.scheduler
            for text in scheduler.violations:
                self._violation(f"{engine.name}: {text}")
            free = scheduler.pool.num_free
            if free != self.scenario.limits.num_blocks - 1 or scheduler.tables.num_requests:
                self._violation(f"{engine.name}: {free} of {self.scenario.limits.num_blocks - 1} blocks are free again")
            if left := scheduler.connector.num_remembered():
                self._violation(f"{engine.name}: the connector remembers {left} requests that have ended")
            if not all(rank.side.drain(120.0) for rank in engine.ranks):
                self._violation(f"{engine.name}: saves or loads are still under way after 120 s")
            for index, rank in enumerate(engine.ranks):
                if self._keeps_all and (left_open := self._open_sessions(rank)):
                    self._violation(f"{engine.name} rank {index}: sessions of {left_open} stayed open")
                damage = rank.memory.caches.check_guards()
                if damage:
                    self._violation(f"{engine.name} rank {index}: {damage[0]}")
            for request in scheduler.ended:
                if request.status.name.startswith("FINISHED_ABORTED"):
                    continue
                if not request.wish.pooling and request.num_output_tokens != request.num_wanted:
                    self._violation(
                        f"{engine.name}: {request.request_id} ended with {request.num_output_tokens} tokens"
                    )
        self.outcome.num_loads = self._count("load_blocks_ok")
        if self._keeps_all and (misses := self._count("load_blocks_miss")):
            self._violation(f"{misses} block loads missed in a pool that nothing ever left")
        self.outcome.violations += self.told.judge(self.engines)
        found, self.outcome.num_audited, self.outcome.num_missing = audit(self.engines)
        self.outcome.violations += found

    @staticmethod
    def _open_sessions(rank: Rank) -> list[str]:
        """Keys of objects that a rank's store client is still writing or reading."""
        assert isinstance(rank.side, PoolWorkerSide)
        store = rank.side.worker._store
        assert isinstance(store, MooncakeStore)
        return sorted({*store._client._open_puts, *store._client._open_gets})

    @property
    def _keeps_all(self) -> bool:
        """Whether whatever was once in the pool stays there."""
        scenario = self.scenario
        return not (scenario.rates or scenario.events or scenario.spare_objects is not None)

    def _count(self, name: str) -> int:
        return sum(
            rank.side.worker.counters.totals().get(name, 0)
            for engine in self.engines
            for rank in engine.ranks
            if isinstance(rank.side, PoolWorkerSide)
        )

    def close(self) -> None:
        """Count, and leave the store."""
        outcome = self.outcome
        for engine in self.engines:
            outcome.num_steps += engine.num_steps
            outcome.num_resets += engine.scheduler.weights
            outcome.num_rows += engine.num_rows_checked
            for hook, seconds in engine.longest_hook_s.items():
                outcome.longest_hook_s[hook] = max(outcome.longest_hook_s.get(hook, 0.0), seconds)
            for rank in engine.ranks:
                assert isinstance(rank.side, PoolWorkerSide)
                outcome.counters.update(rank.side.worker.counters.totals())
            assert isinstance(engine.scheduler.connector, PoolSchedulerSide)
            outcome.counters.update(engine.scheduler.connector.scheduler.counters.totals())
        outcome.faults.update(self.faults.counts)
        outcome.virtual_s = self.tasks.clock.now()
        if not outcome.violations:
            for engine in self.engines:
                for rank in engine.ranks:
                    rank.side.shutdown()
                engine.scheduler.connector.shutdown()
        self.owner.close()


@contextmanager
def _under_control(scenario: Scenario) -> Iterator[tuple[Tasks, SimulatedMaster]]:
    clock = VirtualClock()
    tasks = Tasks(clock, scenario.seed)
    modules = [module for name, module in sys.modules.items() if name.startswith("kvpool_connector.")]
    options = MasterOptions(default_kv_lease_ttl_ms=scenario.lease_ms, put_start_discard_timeout_sec=30.0)
    if scenario.spare_objects is not None:
        # Of what the ballast leaves, a tenth is kept free: by the default the master would never stop evicting.
        spare = scenario.spare_objects * PIECE_BYTES / SEGMENT_BYTES
        options = replace(options, eviction_high_watermark_ratio=1 - spare / 10)
    address = f"127.0.0.1:{next(_ports)}"
    with (
        controlled(tasks, modules),
        SimulatedMaster(address, clock=clock, options=options, seed=scenario.seed) as master,
    ):
        try:
            yield tasks, master
        finally:
            tasks.close()


def run(scenario: Scenario) -> Outcome:
    """Make the cluster, run it, judge it."""
    with _under_control(scenario) as (tasks, master):
        cluster = Cluster(scenario, tasks, master)
        try:
            cluster.run()
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"
            cluster.outcome.violations.append(f"{type(error).__name__} at {where}: {error}")
        cluster.close()
        return cluster.outcome


def run_seed(seed: int, profile: str) -> Outcome:
    """A seed's run in whatever process; what the connector logs is not shown."""
    logging.disable(logging.CRITICAL)
    return run(scenario(seed, profile))


def keep_to_one_processor(processors: SimpleQueue[int]) -> None:
    """A process's threads run one at a time: going from one processor to another only costs them time."""
    number = processors.get()
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[number % len(allowed)]})
