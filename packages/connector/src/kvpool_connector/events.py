"""Which blocks the pool has got from this engine, for routers: told once every shard of a block is in.

The worker side collects the keys that were stored, the scheduler side knows which keys make a block.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvpool_connector.contract.status import Status

MAX_BLOCKS = 1 << 14
"""That are waited for, and that nobody has taken: of both the oldest are forgotten first."""


@dataclass(frozen=True)
class StoredBlock:
    """A block that the pool has."""

    group: int
    block_hash: bytes
    parent: bytes | None
    """Hash of the block before it; None for the first of a prompt."""
    token_ids: tuple[int, ...]
    block_size: int
    """In tokens."""
    lora_name: str | None


class StoredKeys:
    """Keys that one worker has stored, or found stored. Safe from several threads.

    Bounded by the queue of saves: nothing enters that without a step, and each step takes what is here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: set[str] = set()
        self._present: set[str] = set()

    def note(self, keys: Sequence[str], statuses: Sequence[Status]) -> None:
        """What a store answered to a put of `keys`."""
        with self._lock:
            for key, status in zip(keys, statuses, strict=True):
                if status.stored:
                    (self._stored if status.ok else self._present).add(key)

    def take(self) -> tuple[frozenset[str], frozenset[str]]:
        """The keys that were stored, and those that were there before, since the last call."""
        with self._lock:
            taken = frozenset(self._stored), frozenset(self._present)
            self._stored.clear()
            self._present.clear()
        return taken


@dataclass
class _Wait:
    block: StoredBlock
    missing: set[str]
    """Keys that are not in yet."""
    new: bool = False
    """Whether this engine has stored any of it."""


class BlockEvents:
    """Blocks that are being saved, and those of them that are in the pool. The scheduler side's; not for threads."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # By the keys of all shards of a block, oldest first.
        self._waiting: dict[tuple[str, ...], _Wait] = {}
        self._blocks_of: dict[str, tuple[str, ...]] = {}
        self._events: deque[StoredBlock | None] = deque(maxlen=max_blocks)

    def expect(self, keys: Sequence[str], block: StoredBlock) -> None:
        """A save of a block begins; `keys`: of all its shards."""
        whole = tuple(keys)
        if whole in self._waiting:
            return
        if len(self._waiting) == self._max_blocks:
            self._forget(next(iter(self._waiting)))
        self._waiting[whole] = _Wait(block, set(whole))
        self._blocks_of.update((key, whole) for key in whole)

    def saved(self, stored: Collection[str], present: Collection[str]) -> None:
        """Workers have stored objects, and found some there. A block that was there whole is not told again."""
        for keys, new in ((stored, True), (present, False)):
            for key in keys:
                whole = self._blocks_of.get(key)
                if whole is None:
                    continue
                wait = self._waiting[whole]
                wait.missing.discard(key)
                wait.new |= new
                if not wait.missing:
                    self._forget(whole)
                    if wait.new:
                        self._events.append(wait.block)

    def cleared(self) -> None:
        """The pool was reset: what was stored before is not reachable any more, and what is under way will not be."""
        self._waiting.clear()
        self._blocks_of.clear()
        self._events.clear()
        self._events.append(None)

    def take(self) -> list[StoredBlock | None]:
        """What has happened since the last call, in order; None for a reset."""
        events = list(self._events)
        self._events.clear()
        return events

    def _forget(self, whole: tuple[str, ...]) -> None:
        del self._waiting[whole]
        for key in whole:
            del self._blocks_of[key]
