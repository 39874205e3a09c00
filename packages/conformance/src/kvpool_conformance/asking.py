"""Asks a backend so that whatever it does ends in a failed test with the cause named, never in a hung or a green run.

Every call runs in a thread of its backend's own and has a time limit. What it answers is checked for form: one status a
key, a number in range, a set of the blocks that were asked for. A backend may say with an attribute `call_limit_s` how
many seconds a call may take.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from kvpool_conformance.backend import CacheBackend, Node, StoreBackend
from kvpool_conformance.cases import Deployment
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces, Store

CALL_LIMIT_S = 60.0
T = TypeVar("T")


class UnansweredError(AssertionError):
    """A call did not return within its limit. It may still touch the memory that it was given."""


class Asker:
    """One thread in which calls run, one after the other. It is left behind when a call never returns."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._hanging = ""
        self._thread = threading.Thread(target=self._run, name="conformance-asker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def ask(self, name: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """What the call returns.

        Raises `UnansweredError` when it does not return in time, and `AssertionError` when it raises; skips and
        `NotImplementedError` pass.
        """
        if self._hanging:
            raise UnansweredError(f"{name} cannot be asked: {self._hanging} has not returned yet")
        done = threading.Event()
        answer: list[T] = []
        error: list[BaseException] = []

        def call() -> None:
            try:
                answer.append(function(*arguments, **named))
            except BaseException as raised:
                error.append(raised)
            done.set()

        self._calls.put(call)
        if not done.wait(self._limit_s):
            self._hanging = name
            raise UnansweredError(f"{name} did not return within {self._limit_s:g} s")
        if not error:
            return answer[0]
        if isinstance(error[0], NotImplementedError | AssertionError) or not isinstance(error[0], Exception):
            raise error[0]
        raise AssertionError(f"{name} raised {type(error[0]).__name__}: {error[0]}") from error[0]

    def close(self) -> None:
        """End the thread once nothing runs in it."""
        self._calls.put(None)


def expect(name: str, answer: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Fail unless an answer is of a kind."""
    exact = isinstance(answer, kind) and not isinstance(answer, bool)
    assert exact, f"{name} returned {answer!r:.200}, a {type(answer).__name__}; expected {wanted}"


def one_each(name: str, statuses: object, keys: Sequence[str]) -> list[Status]:
    """The law of answers: a list of one status a key."""
    expect(name, statuses, list, "a list of statuses")
    assert isinstance(statuses, list)
    assert len(statuses) == len(keys), f"{name} returned {len(statuses)} statuses for {len(keys)} keys"
    for status in statuses:
        expect(name, status, Status, "one Status a key")
    return statuses


class AskedStore:
    """A store whose every answer is checked for form."""

    def __init__(self, store: Store, asker: Asker) -> None:
        self._store = store
        self._asker = asker

    def _ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        return self._asker.ask(f"store.{name}", getattr(self._store, name), *arguments, **named)

    def _status(self, name: str, *arguments: Any, **named: Any) -> Status:
        status = self._ask(name, *arguments, **named)
        expect(f"store.{name}", status, Status, "a Status")
        assert isinstance(status, Status)
        return status

    def register(self, address: int, num_bytes: int) -> Status:
        return self._status("register", address, num_bytes)

    def unregister(self, address: int) -> Status:
        return self._status("unregister", address)

    def exist(self, keys: Sequence[str]) -> list[Status]:
        return one_each("store.exist", self._ask("exist", keys), keys)

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return one_each("store.put", self._ask("put", keys, addresses, sizes), keys)

    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return one_each("store.get", self._ask("get", keys, addresses, sizes), keys)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return one_each("store.remove", self._ask("remove", keys, force=force), keys)

    def write(self, key: str, value: bytes, *, pinned: bool = False) -> Status:
        return self._status("write", key, value, pinned=pinned)

    def read(self, key: str) -> tuple[Status, bytes]:
        answer = self._ask("read", key)
        expect("store.read", answer, tuple, "a Status and bytes")
        status, value = answer
        expect("store.read", status, Status, "a Status and bytes")
        expect("store.read", value, bytes, "a Status and bytes")
        return status, value

    def close(self) -> None:
        self._ask("close")


class AskedNode:
    """A node whose every answer is checked for form."""

    def __init__(self, node: Node, asker: Asker) -> None:
        self._node = node
        self._asker = asker

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._asker.ask(f"node.{name}", getattr(self._node, name), *arguments)

    def _count(self, name: str, contents: Mapping[int, str] | Sequence[str]) -> int:
        count = self._ask(name, contents)
        expect(f"node.{name}", count, int, "a number of blocks")
        assert 0 <= count <= len(contents), f"node.{name} returned {count} for {len(contents)} blocks"
        return int(count)

    def _words(self, name: str, argument: object) -> list[str]:
        words = self._ask(name, argument)
        expect(f"node.{name}", words, list, "a list of differences, empty when there are none")
        return list(words)

    def fill(self, contents: Mapping[int, str]) -> None:
        self._ask("fill", contents)

    def save(self, contents: Mapping[int, str]) -> int:
        return self._count("save", contents)

    def hits(self, contents: Sequence[str]) -> int:
        return self._count("hits", contents)

    def load(self, contents: Mapping[int, str]) -> set[int]:
        failed = self._ask("load", contents)
        expect("node.load", failed, (set, frozenset), "the set of blocks that were not loaded")
        others = sorted(set(failed) - set(contents))
        assert not others, f"node.load reports blocks {others}, which were not asked for"
        return set(failed)

    def poison(self) -> None:
        self._ask("poison")

    def mismatches(self, contents: Mapping[int, str]) -> list[str]:
        return self._words("mismatches", contents)

    def changed_outside(self, block_ids: Sequence[int]) -> list[str]:
        return self._words("changed_outside", block_ids)


@contextmanager
def _entered(name: str, backend: object, make: Callable[[], AbstractContextManager[T]]) -> Iterator[tuple[T, Asker]]:
    """What a context manager of the backend gives, entered and left within the limit."""
    asker = Asker(limit_of(backend))
    try:
        context = asker.ask(name, make)
        try:
            yield asker.ask(name, context.__enter__), asker
        except BaseException:
            # What is hanging already has been named.
            with suppress(UnansweredError):
                asker.ask(f"leaving {name}", context.__exit__, *sys.exc_info())
            raise
        asker.ask(f"leaving {name}", context.__exit__, None, None, None)
    finally:
        asker.close()


@contextmanager
def opened(backend: StoreBackend) -> Iterator[Store]:
    """A client of the backend, asked with care."""
    with _entered("backend.open", backend, backend.open) as (store, asker):
        yield AskedStore(store, asker)


@contextmanager
def node_of(backend: CacheBackend, deployment: Deployment, rank: int = 0, *, elsewhere: bool = False) -> Iterator[Node]:
    """A node of the backend, asked with care."""
    made = _entered("backend.node", backend, lambda: backend.node(deployment, rank, elsewhere=elsewhere))
    with made as (node, asker):
        yield AskedNode(node, asker)


def ask(backend: object, name: str, *arguments: Any) -> Any:
    """Call a method of the backend itself, within its limit."""
    asker = Asker(limit_of(backend))
    try:
        return asker.ask(f"backend.{name}", getattr(backend, name), *arguments)
    finally:
        asker.close()


def limit_of(backend: object) -> float:
    """Seconds that a call of the backend may take."""
    return float(getattr(backend, "call_limit_s", CALL_LIMIT_S))
