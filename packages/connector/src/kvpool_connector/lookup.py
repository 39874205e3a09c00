"""How the scheduler side asks what is in the pool: in bounded time, whatever the store does."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from kvpool_connector.answers import statuses_of
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Store
from kvpool_connector.outage import Outage

logger = logging.getLogger(__name__)


_Question = Callable[[Sequence[str]], list[Status]]


def write_markers(store: Store, keys: Sequence[str]) -> list[Status]:
    """Store an object that is not evicted under each key, of one byte: Mooncake has no empty ones."""
    return [store.write(key, b"1", pinned=True) for key in keys]


class Lookup(Protocol):
    """Answers for keys; one transport or another."""

    def exist(self, keys: Sequence[str]) -> list[Status]:
        """One status a key: `OK`, `MISS`, or `TIMEOUT` / `UNAVAILABLE` for all within the time limit."""
        ...

    def mark(self, key: str) -> Status:
        """Store a small object under `key` that is not evicted; within the same limit."""
        ...

    def close(self) -> None:
        """Give back what the transport holds. Idempotent."""
        ...


class StoreLookup:
    """Asks a store of its own, in a thread that may hang without anybody waiting for it."""

    def __init__(self, store: Store, outage: Outage, timeout_s: float) -> None:
        """`store` is connected; the lookup closes it."""
        self._store = store
        self._outage = outage
        self._timeout_s = timeout_s
        self._asked: queue.SimpleQueue[tuple[_Question, Sequence[str], queue.SimpleQueue[list[Status]]] | None]
        self._asked = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="kvpool-lookup", daemon=True)
        self._thread.start()

    def exist(self, keys: Sequence[str]) -> list[Status]:
        """See `Lookup`."""
        return self._ask(self._store.exist, keys) if keys else []

    def mark(self, key: str) -> Status:
        """See `Lookup`."""
        return self._ask(partial(write_markers, self._store), [key])[0]

    def _ask(self, question: _Question, keys: Sequence[str]) -> list[Status]:
        # A call that still hangs is as good an answer as another time-out.
        if self._outage.active or not self._idle.is_set():
            return [Status.UNAVAILABLE] * len(keys)
        self._idle.clear()
        answer: queue.SimpleQueue[list[Status]] = queue.SimpleQueue()
        self._asked.put((question, keys, answer))
        try:
            statuses = answer.get(timeout=self._timeout_s)
        except queue.Empty:
            statuses = [Status.TIMEOUT] * len(keys)
        self._outage.note(statuses)
        return statuses

    def close(self) -> None:
        """See `Lookup`."""
        self._asked.put(None)
        self._thread.join(timeout=60)
        # Mooncake crashes the process when it is closed under a call: a hanging thread keeps it open.
        if not self._thread.is_alive():
            self._store.close()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            question, keys, answer = asked
            answer.put(statuses_of(question, keys))
            self._idle.set()
