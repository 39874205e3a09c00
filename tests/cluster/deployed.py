"""The ranks of one engine, one at a time, and its scheduler side, on a simulated store: a pool without the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

import numpy as np

import kvpool_simulator.store
from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.keys import parse_key
from kvpool_connector.contract.shards import RankShards, ShardMap
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces
from kvpool_connector.contract.topology import Rank
from kvpool_connector.host import HostDevice
from kvpool_connector.metadata import GroupBlocks, LoadJob, SaveJob, StepMetadata
from kvpool_connector.mooncake import MooncakeStore
from kvpool_connector.scheduler import PoolScheduler
from kvpool_connector.tracker import GroupRule, RequestView
from kvpool_connector.worker import PoolWorker
from kvpool_simulator.device import allocate
from kvpool_simulator.engine import RankMemory
from kvpool_simulator.engine.oracle import Rows
from kvpool_simulator.store import SimulatedMaster
from tests.cluster.ranks import registered_groups, spec_of, topology_of
from tests.cluster.scenario import Shape

PATIENCE_S = 100


class RecordingStore(MooncakeStore):
    """A client that remembers which blocks' objects it was asked about or given: work, stored or not."""

    touched: frozenset[str] = frozenset()

    def exist(self, keys: Sequence[str]) -> list[Status]:
        self.touched |= {key for key in keys if parse_key(key).block_hash}
        return super().exist(keys)

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        self.touched |= set(keys)
        return super().put(keys, addresses, sizes)

    def begin_put(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Status]:
        self.touched |= set(keys)
        return super().begin_put(keys, sizes)


class AskDirectly:
    """A `Lookup` without a thread and without a time limit."""

    def __init__(self, store: MooncakeStore) -> None:
        self._store = store

    def exist(self, keys: Sequence[str]) -> list[Status]:
        return self._store.exist(keys)

    def mark(self, key: str) -> Status:
        return self._store.write(key, b"1", pinned=True)

    def close(self) -> None:
        self._store.close()


class Prompt:
    """Whole logical blocks of tokens: of each token a number that stands for its prefix, of each block a hash."""

    def __init__(self, name: str, num_blocks: int, block_tokens: int, after: Prompt | None = None) -> None:
        """`after`: a prompt whose beginning, half of it, this one shares."""
        random = Random(name)
        self.keys = [random.getrandbits(64) for _ in range(num_blocks * block_tokens)]
        self.hashes = [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(num_blocks)]
        self.num_shared = 0
        if after is not None:
            self.num_shared = len(after.hashes) // 2
            self.keys[: self.num_shared * block_tokens] = after.keys[: self.num_shared * block_tokens]
            self.hashes[: self.num_shared] = after.hashes[: self.num_shared]


@dataclass
class Loaded:
    """What one rank has after a load."""

    failed: set[int]
    """Blocks, by their index in the prompt, that were reported as not loaded."""
    wrong: list[str]
    """Bytes that are not what they should be, in words."""


class Deployed:
    """Every rank saves, is looked up and loads; each in caches of its own, which live only that long."""

    def __init__(self, shape: Shape, master: SimulatedMaster, staging_bytes: int = 1 << 20, **settings: object) -> None:
        """`settings`: more of the connector's."""
        self.shape = shape
        self.topology = topology_of(shape)
        self.block_tokens = shape.block_sizes[0] * shape.pcp * shape.dcp
        self.announced: dict[Rank, RankShards] = {}
        self._master = master
        self._settings = {"staging_bytes": staging_bytes, "load_timeout_s": PATIENCE_S, **settings}
        self.ranks = list(self.topology.ranks())

    def beside(self, shape: Shape, **settings: object) -> Deployed:
        """Another engine on the same pool, with some other settings."""
        return Deployed(shape, self._master, **{**self._settings, **settings})  # type: ignore[arg-type]

    def prompt(self, name: str, num_blocks: int, after: Prompt | None = None) -> Prompt:
        """A prompt of whole blocks."""
        return Prompt(name, num_blocks, self.block_tokens, after)

    def _store(self) -> RecordingStore:
        settings = StoreSettings(
            master_server_address=self._master.address, protocol="tcp", global_segment_size=0, local_buffer_size=0
        )
        store = RecordingStore(settings, module=kvpool_simulator.store)
        store.connect()
        return store

    def _memory(self, rank: Rank, num_blocks: int) -> RankMemory:
        """Where the tokens lie, as vLLM has it: `pcp_rank * dcp_size + dcp_rank` takes every `size`-th run."""
        shape = self.shape
        position = rank.pcp * shape.dcp + rank.tp % shape.dcp
        caches = allocate(spec_of(shape, rank), num_blocks, kv_transfer=False)
        return RankMemory(caches, position, shape.pcp * shape.dcp, shape.interleave)

    @contextmanager
    def _rank(self, rank: Rank, num_blocks: int) -> Iterator[tuple[RankMemory, PoolWorker, RecordingStore]]:
        memory = self._memory(rank, num_blocks)
        settings = PoolSettings.model_validate(self._settings)
        store = self._store()
        worker = PoolWorker(settings, store, HostDevice(), self.topology, rank, ModelIdentity(self.shape.model))
        try:
            self.announced[rank] = worker.register(
                memory.caches.kv_caches, registered_groups(self.shape, memory.caches)
            )
            yield memory, worker, store
        finally:
            worker.close()

    def save(self, prompt: Prompt, first: int = 0) -> dict[Rank, list[str]]:
        """Every rank computes the prompt and saves its blocks from `first` on; the keys that each dealt with."""
        touched: dict[Rank, list[str]] = {}
        count = len(prompt.hashes)
        for rank in self.ranks:
            with self._rank(rank, count + 1) as (memory, worker, store):
                table = list(range(1, count + 1))
                rows = memory.rows(np.array(prompt.keys, np.uint64), table, self.block_tokens, 0)
                for components in memory.layers.values():
                    for component in components:
                        component.write(rows.block_ids, rows.rows_at, component.expected(rows.keys))
                blocks = GroupBlocks(0, tuple(table[first:]), tuple(prompt.hashes[first:]))
                step = StepMetadata(saves=(SaveJob("request", (blocks,)),))
                worker.begin_step(step)
                for name in hooks(memory):
                    worker.save_layer(name)
                worker.end_step(step)
                assert worker.drain(PATIENCE_S), "saves did not end"
                touched[rank] = sorted(store.touched)
        return touched

    def hit(self, prompt: Prompt, local: int = 0) -> int:
        """Blocks that the scheduler side finds beyond the engine's own `local`."""
        pool = PoolScheduler([GroupRule(self.block_tokens)], self.block_tokens, AskDirectly(self._store()))
        pool.set_shards(ShardMap(self.topology, self.announced.values()))
        view = RequestView("request", len(prompt.keys) + 1, len(prompt.keys) + 1, prompt.hashes)
        found, _ = pool.num_matched_tokens(view, local * self.block_tokens)
        pool.close()
        return found // self.block_tokens

    def load(self, prompt: Prompt, rank: Rank) -> Loaded:
        """One rank loads all blocks of the prompt, each into another block than the one it was saved from."""
        count = len(prompt.hashes)
        with self._rank(rank, count + 1) as (memory, worker, _):
            table = list(range(count, 0, -1))
            step = StepMetadata(loads=(LoadJob("request", (GroupBlocks(0, tuple(table), tuple(prompt.hashes)),)),))
            worker.begin_step(step)
            worker.start_loads(step)
            rows = memory.rows(np.array(prompt.keys, np.uint64), table, self.block_tokens, 0)
            seen: dict[str, set[int]] = {}
            for name in hooks(memory):
                # An indexer of its own has no hook: it reads in front of its layer's.
                for other in memory.layers:
                    if other != name and layer_of(other) == layer_of(name):
                        seen[other] = wrong_blocks(memory, other, rows)
                worker.wait_layer(name)
                seen[name] = wrong_blocks(memory, name, rows)
            worker.end_step(step)
            failed = worker.take_failed_blocks()
            kept = [0 if block_id in failed else block_id for block_id in table]
            rows = memory.rows(np.array(prompt.keys, np.uint64), kept, self.block_tokens, 0)
            wrong = [str(damage) for damage in memory.caches.check_guards()]
            wrong += [f"{rank} {name} computed before it had landed" for name, early in seen.items() if early - failed]
            for name, components in memory.layers.items():
                for component in components:
                    differs = component.wrong(rows.block_ids, rows.rows_at, component.expected(rows.keys))
                    if differs.any():
                        wrong.append(f"{rank} {name} {component.name}: {int(differs.sum())} tokens are wrong")
            return Loaded({table.index(block_id) for block_id in failed}, wrong)

    def keys(self, prompt: Prompt, index: int, rank: Rank) -> list[str]:
        """Of the objects that this rank loads for a block of the prompt: one for each shard that it holds."""
        announced = self.announced[rank]
        groups = range(len(announced.descriptors))
        return [shard.key(prompt.hashes[index]) for group in groups for shard in announced.shards(group)]

    def remove(self, key: str) -> None:
        """Lose this object for good."""
        store = self._store()
        assert store.remove([key], force=True) == [Status.OK]
        store.close()

    @contextmanager
    def lost(self, key: str) -> Iterator[None]:
        """Without this object, while the context lasts."""
        store = self._store()
        value = self._master.peek(key)
        assert value is not None, f"{key} is not in the pool"
        assert store.remove([key], force=True) == [Status.OK]
        yield
        assert store.write(key, value) is Status.OK
        store.close()

    def objects(self) -> dict[str, bytes]:
        """All blocks in the pool."""
        known = self._master.service.master.keys()
        keys = [key for key in known if parse_key(key).block_hash]
        return {key: value for key in keys if (value := self._master.peek(key)) is not None}


def hooks(memory: RankMemory) -> list[str]:
    """The entries whose hooks the engine calls, in the order of computing."""
    return [name for name in memory.layers if ".indexer." not in name]


def layer_of(name: str) -> str:
    """What the entries of one layer have in common."""
    return name.split(".self_attn")[0]


def wrong_blocks(memory: RankMemory, name: str, rows: Rows) -> set[int]:
    """Blocks that do not hold what they should in any component of an entry."""
    differs = [
        component.wrong(rows.block_ids, rows.rows_at, component.expected(rows.keys))
        for component in memory.layers[name]
    ]
    return {int(block_id) for some in differs for block_id in rows.block_ids[some]}


@contextmanager
def pool(address: str = "127.0.0.1:50051", segment_bytes: int = 256 << 20) -> Iterator[SimulatedMaster]:
    """A master, and a client that owns the memory."""
    with SimulatedMaster(address) as master:
        owner = MooncakeStore(
            StoreSettings(
                master_server_address=master.address,
                protocol="tcp",
                global_segment_size=segment_bytes,
                local_buffer_size=0,
            ),
            module=kvpool_simulator.store,
        )
        owner.connect()
        yield master
        owner.close()
