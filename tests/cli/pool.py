"""A pool with a master, memory and HTTP endpoints, and the command line pointed at it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

import kvpool_simulator.store
from kvpool_connector.cli.app import app
from kvpool_connector.cli.hashes import block_hashes
from kvpool_connector.cli.session import Session, connect_mooncake, knock
from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.contract.clock import MonotonicClock
from kvpool_connector.contract.descriptor import ComponentContent, Descriptor, LayerContent, ModelIdentity
from kvpool_connector.contract.shards import Shard
from kvpool_connector.contract.store import Store
from kvpool_connector.contract.topology import Topology
from kvpool_connector.mooncake import MooncakeStore
from kvpool_simulator.store import MasterOptions, SimulatedMaster
from tests.targets.endpoint import endpoint_of
from tests.targets.real_mooncake import make_store as make_real_store
from tests.targets.real_mooncake import real_master
from tests.targets.simulator import make_store as make_simulated_store

BLOCK = 4
"""Tokens of a block."""
SEED = "7"
LEASE_MS = 2000
CAPACITY = 1 << 30


def connect_simulated(settings: StoreSettings, pool: PoolSettings) -> Store:
    """A client of a simulated master."""
    store = MooncakeStore(settings, pool, module=kvpool_simulator.store)
    store.connect()
    return store


@dataclass
class Pool:
    """One pool to be looked at."""

    name: str
    address: str
    endpoint: str
    connect: Callable[[StoreSettings, PoolSettings], Store]
    store: Store
    """A client of the test's own."""
    knock: Callable[[str, int], None] = knock

    def run(self, *words: str, **changes: Any) -> Result:
        """A command as a user types it; `changes` are fields of the session."""
        environ = {"MOONCAKE_MASTER": self.address, "PYTHONHASHSEED": SEED}
        session = Session(environ, self.connect, knock=self.knock, endpoint=self.endpoint, protocol="tcp")
        return CliRunner().invoke(app, list(words), obj=replace(session, **changes), catch_exceptions=False)

    def ask(self, *words: str, status: int = 0, **changes: Any) -> Any:
        """The JSON answer of a command; its exit status is `status`."""
        result = self.run(*words, "--json", **changes)
        assert result.exit_code == status, result.output
        return json.loads(result.stdout)

    def keys(self) -> set[str]:
        """All keys of the pool, from the endpoint; no lease is granted."""
        return {found["key"] for found in self.ask("ls", "--limit", "100000")["objects"]}

    def overwrite(self, key: str, value: bytes) -> None:
        """Another object under a key."""
        assert self.store.remove([key], force=True)[0].ok
        assert self.store.write(key, value).ok


@contextmanager
def simulated_pool() -> Iterator[Pool]:
    """On the simulated store."""
    with (
        SimulatedMaster(clock=MonotonicClock(), options=MasterOptions(LEASE_MS), profile="tcp") as master,
        endpoint_of(master, CAPACITY) as endpoint,
    ):
        owner = make_simulated_store(master.address, CAPACITY)

        def knock_simulated(host: str, port: int) -> None:
            if f"{host}:{port}" != master.address:
                raise ConnectionRefusedError("a simulated master listens at no port")

        yield Pool("simulator", master.address, endpoint, connect_simulated, owner, knock_simulated)
        owner.close()


@contextmanager
def real_pool() -> Iterator[Pool]:
    """On real Mooncake."""
    with real_master(CAPACITY, LEASE_MS / 1000) as master:
        store = make_real_store(master.address, 0)
        yield Pool("mooncake", master.address, master.endpoint, connect_mooncake, store)
        store.close()


POOLS = {"simulator": simulated_pool, "mooncake": real_pool}


def descriptors(model: str, tp_size: int = 2, num_heads: int = 2) -> list[Descriptor]:
    """One a rank: two layers of k and v, four tokens a block."""
    topology = Topology(num_heads, tp_size)
    count = max(1, num_heads // tp_size)
    page = (BLOCK, count, 8)
    components = tuple(ComponentContent(name, "bfloat16", page, "NHD") for name in ("k", "v"))
    layers = tuple(LayerContent(str(i), components) for i in range(2))
    return [
        Descriptor(ModelIdentity(model), 0, BLOCK, topology.heads(rank), topology.context(rank), layers)
        for rank in topology.ranks()
    ]


@dataclass
class Filled:
    """A deployment whose prompt of `num_tokens` tokens is in the pool, every shard of every block."""

    namespace: str
    shards: list[Shard]
    object_bytes: int
    hashes: list[bytes]

    def key(self, rank: int, block: int) -> str:
        """Key of one object."""
        return self.shards[rank].key(self.hashes[block])


def fill(pool: Pool, namespace: str, token_ids: list[int], model: str = "model", tp_size: int = 2) -> Filled:
    """Store what engines of that deployment would."""
    found = descriptors(model, tp_size)
    shards = [Shard(namespace, 0, descriptor.fingerprint) for descriptor in found]
    hashes = block_hashes(token_ids, BLOCK, SEED)
    for shard, descriptor in zip(shards, found, strict=True):
        assert pool.store.write(shard.descriptor_key(), descriptor.to_json().encode()).ok
        for block_hash in hashes:
            assert pool.store.write(shard.key(block_hash), bytes(range(256)) * (descriptor.object_bytes // 256)).ok
    return Filled(namespace, shards, found[0].object_bytes, hashes)
