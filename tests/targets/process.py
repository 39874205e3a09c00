"""Nodes in other processes, asked through a pipe, with a limit on every answer."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from kvpool_conformance.cases import Deployment
from kvpool_connector.contract.store import Store
from tests.targets.node import LocalNode

ANSWER_LIMIT_S = 300.0
StoreFactory = Callable[[str, int], Store]
"""(master address, segment bytes) -> a connected store; a module-level function, so that it can cross processes."""


def serve(connection: Connection, make_store: StoreFactory, address: str, arguments: tuple[Any, ...]) -> None:
    """The other process: a node that does what it is asked until it is told to end."""
    node: LocalNode | None = None
    try:
        deployment, rank, staging_bytes = arguments
        node = LocalNode(deployment, rank, make_store(address, 0), staging_bytes)
        connection.send((True, None))
        while (request := connection.recv()) is not None:
            name, values = request
            connection.send((True, getattr(node, name)(*values)))
    except Exception:
        connection.send((False, traceback.format_exc()))
    finally:
        if node is not None:
            node.close()


class RemoteNode:
    """A `kvpool_conformance.backend.Node` whose process is another."""

    def __init__(
        self, make_store: StoreFactory, address: str, deployment: Deployment, rank: int, staging_bytes: int = 8 << 20
    ) -> None:
        self._connection, other = multiprocessing.Pipe()
        arguments = (other, make_store, address, (deployment, rank, staging_bytes))
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._answer("start")

    def _answer(self, name: str) -> Any:
        if not self._connection.poll(ANSWER_LIMIT_S):
            self._process.kill()
            raise TimeoutError(f"node.{name} did not answer within {ANSWER_LIMIT_S:g} s")
        done, value = self._connection.recv()
        if not done:
            raise RuntimeError(f"node.{name} failed in the other process:\n{value}")
        return value

    def _ask(self, name: str, *values: Any) -> Any:
        self._connection.send((name, values))
        return self._answer(name)

    def fill(self, contents: Mapping[int, str]) -> None:
        self._ask("fill", contents)

    def save(self, contents: Mapping[int, str]) -> int:
        return int(self._ask("save", contents))

    def hits(self, contents: Sequence[str]) -> int:
        return int(self._ask("hits", contents))

    def load(self, contents: Mapping[int, str]) -> set[int]:
        return set(self._ask("load", contents))

    def poison(self) -> None:
        self._ask("poison")

    def mismatches(self, contents: Mapping[int, str]) -> list[str]:
        return list(self._ask("mismatches", contents))

    def changed_outside(self, block_ids: Sequence[int]) -> list[str]:
        return list(self._ask("changed_outside", block_ids))

    def close(self) -> None:
        """End the process; it leaves the pool by itself, or is killed."""
        if self._process.is_alive():
            self._connection.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        self._connection.close()
