"""Nodes in other processes, asked through a pipe, with a limit on every answer."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from kvpool_conformance.cases import Deployment
from kvpool_connector.contract.store import SessionStore
from tests.targets.borrowed import Borrowed
from tests.targets.memory import MemoryFactory
from tests.targets.node import LocalNode

ANSWER_LIMIT_S = 300.0
StoreFactory = Callable[[str, int], SessionStore]
"""(master address, segment bytes) -> a connected store; a module-level function, so that it can cross processes."""


def serve(connection: Connection, make_store: StoreFactory, make_memory: MemoryFactory, address: str) -> None:
    """The other process: one node after another does what it is asked, until told to end or left alone."""
    store: SessionStore | None = None
    node: LocalNode | None = None

    def answer(name: str, *values: Any) -> Any:
        nonlocal store, node
        if name == "open":
            store = store or make_store(address, 0)
            deployment, rank, staging_bytes = values
            node = LocalNode(deployment, rank, Borrowed(store), staging_bytes, make_memory())
            return None
        assert node is not None, f"{name} was asked of no node"
        found = getattr(node, name)(*values)
        if name == "close":
            node = None
        return found

    try:
        while (request := connection.recv()) is not None:
            try:
                connection.send((True, answer(*request)))
            except Exception:
                connection.send((False, traceback.format_exc()))
    except EOFError:
        return
    finally:
        if node is not None:
            node.close()
        if store is not None:
            store.close()


class OtherProcess:
    """A process for nodes; starting one takes seconds, so it serves one node after another."""

    def __init__(self, make_store: StoreFactory, make_memory: MemoryFactory, address: str) -> None:
        self._connection, other = multiprocessing.Pipe()
        arguments = (other, make_store, make_memory, address)
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    @property
    def alive(self) -> bool:
        """False once the process has ended or was given up."""
        return self._process.is_alive()

    def ask(self, name: str, *values: Any) -> Any:
        """What the other process answers.

        Raises `TimeoutError` when it does not, and ends it then; `RuntimeError` with its traceback when it fails.
        """
        self._connection.send((name, *values))
        if not self._connection.poll(ANSWER_LIMIT_S):
            self._process.kill()
            raise TimeoutError(f"node.{name} did not answer within {ANSWER_LIMIT_S:g} s")
        done, value = self._connection.recv()
        if not done:
            raise RuntimeError(f"node.{name} failed in the other process:\n{value}")
        return value

    def close(self) -> None:
        """End the process; it leaves the pool by itself, or is killed."""
        if self.alive:
            self._connection.send(None)
        self._process.join(30)
        if self.alive:
            self._process.kill()
            self._process.join(10)
        self._connection.close()


class RemoteNode:
    """A `kvpool_conformance.backend.Node` in another process."""

    def __init__(self, process: OtherProcess, deployment: Deployment, rank: int, staging_bytes: int) -> None:
        self._process = process
        process.ask("open", deployment, rank, staging_bytes)

    def fill(self, contents: Mapping[int, str]) -> None:
        self._process.ask("fill", contents)

    def save(self, contents: Mapping[int, str]) -> int:
        return int(self._process.ask("save", contents))

    def hits(self, contents: Sequence[str]) -> int:
        return int(self._process.ask("hits", contents))

    def load(self, contents: Mapping[int, str]) -> set[int]:
        return set(self._process.ask("load", contents))

    def poison(self) -> None:
        self._process.ask("poison")

    def mismatches(self, contents: Mapping[int, str]) -> list[str]:
        return list(self._process.ask("mismatches", contents))

    def changed_outside(self, block_ids: Sequence[int]) -> list[str]:
        return list(self._process.ask("changed_outside", block_ids))

    def close(self) -> None:
        """Leave the pool."""
        self._process.ask("close")
