"""What all targets share: a store backend and a cache backend over one master."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpool_conformance.backend import Node
from kvpool_conformance.cases import Deployment
from kvpool_connector.contract.shards import RankShards
from kvpool_connector.contract.store import SessionStore
from tests.targets.borrowed import Borrowed
from tests.targets.caches import cache_spec
from tests.targets.memory import HostMemory, Memory, MemoryFactory
from tests.targets.node import LocalNode, block_hash
from tests.targets.process import OtherProcess, RemoteNode, StoreFactory


class Target:
    """A `StoreBackend` and a `CacheBackend` in one."""

    def __init__(
        self,
        name: str,
        address: str,
        make_store: StoreFactory,
        lease_s: float,
        make_memory: MemoryFactory = HostMemory,
        num_clients: int = 2,
    ) -> None:
        """`make_store` connects to the master at `address`, which has memory already."""
        self.name = name
        self.lease_s = lease_s
        self.address = address
        self._make_store = make_store
        self._make_memory = make_memory
        self._clients = [make_store(address, 0) for _ in range(num_clients)]
        self._lent = 0
        self._announced: dict[Deployment, list[RankShards]] = {}
        self._idle: list[OtherProcess] = []

    # StoreBackend

    @contextmanager
    def open(self) -> Iterator[SessionStore]:
        """Clients, lent in turn: what one writes the other reads."""
        store = Borrowed(self._clients[self._lent % len(self._clients)])
        self._lent += 1
        try:
            yield store
        finally:
            store.close()

    def peek(self, key: str) -> bytes | None:
        raise NotImplementedError

    def poke(self, key: str, offset: int, value: bytes) -> None:
        raise NotImplementedError

    def advance(self, seconds: float) -> None:
        raise NotImplementedError

    def memory(self) -> Memory:
        """Of another node in this process."""
        return self._make_memory()

    # CacheBackend

    def offers(self, deployment: Deployment) -> str:
        try:
            cache_spec(deployment.case, deployment.tp_size, 0)
        except ValueError as error:
            return str(error)
        if deployment.transfer == "layerwise" and deployment.case.family.startswith("deepseek-v4"):
            return "layer by layer, where a layer has caches in several groups"
        return ""

    @contextmanager
    def node(
        self, deployment: Deployment, rank: int = 0, *, elsewhere: bool = False, staging_bytes: int = 8 << 20
    ) -> Iterator[Node]:
        if elsewhere:
            with self._other_process() as process:
                remote = RemoteNode(process, deployment, rank, staging_bytes)
                yield remote
                remote.close()
            return
        with self.open() as store:
            local = LocalNode(deployment, rank, store, staging_bytes, self._make_memory())
            self._announced[deployment] = local.all_ranks()
            try:
                yield local
            finally:
                local.close()

    @contextmanager
    def _other_process(self) -> Iterator[OtherProcess]:
        """An idle process, or another one. Whatever went wrong in it ends it."""
        process = self._idle.pop() if self._idle else OtherProcess(self._make_store, self._make_memory, self.address)
        try:
            yield process
        except BaseException:
            process.close()
            raise
        self._idle.append(process)

    def lose(self, deployment: Deployment, rank: int, content: str, part: int = 0) -> None:
        with self.open() as store:
            (status,) = store.remove([self.key(deployment, rank, content, part=part)], force=True)
            assert status.ok, f"removing the object of {content!r}: {status}"

    def key(self, deployment: Deployment, rank: int, content: str, group: int = 0, part: int = 0) -> str:
        """The key of an object that a rank of a deployment, whose node there was, loads for a content."""
        (shards,) = [shards for shards in self._announced[deployment] if shards.rank.tp == rank]
        return shards.shards(group)[part].key(block_hash(content))

    def close(self) -> None:
        """End the other processes and close the lent clients."""
        for process in self._idle:
            process.close()
        for client in self._clients:
            client.close()
