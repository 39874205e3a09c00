"""What an author supplies: a store to be judged, or nodes whose caches are saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvpool_conformance.cases import Deployment
from kvpool_connector.contract.store import Store


class StoreBackend(Protocol):
    """A shared store: several clients see the same objects."""

    name: str

    def open(self) -> AbstractContextManager[Store]:
        """A connected client; closed when the context ends."""
        ...

    def peek(self, key: str) -> bytes | None:
        """An object's bytes round the store's interface, or None; raises `NotImplementedError` where that cannot be."""
        ...

    def poke(self, key: str, offset: int, value: bytes) -> None:
        """Change an object's bytes round the store's interface; or `NotImplementedError`."""
        ...

    def advance(self, seconds: float) -> None:
        """Let time pass for the store: a simulator moves its clock, a real one sleeps."""
        ...

    @property
    def lease_s(self) -> float:
        """Seconds that a lookup or read protects an object from removal; 0 where there are no leases."""
        ...


class Node(Protocol):
    """One rank of an engine: a process with caches. A content is a name from which all bytes of a block follow."""

    def fill(self, contents: Mapping[int, str]) -> None:
        """Write each block's content into all its pages."""
        ...

    def save(self, contents: Mapping[int, str]) -> int:
        """Save blocks under their contents' names; returns, when all is done, how many this rank stored or found."""
        ...

    def hits(self, contents: Sequence[str]) -> int:
        """How many of the contents, from the first on, a lookup of the whole engine finds."""
        ...

    def load(self, contents: Mapping[int, str]) -> set[int]:
        """Fill blocks from the pool; returns the blocks that are reported as not loaded."""
        ...

    def poison(self) -> None:
        """Set every page to what was never computed, and remember it for `changed_outside`."""
        ...

    def mismatches(self, contents: Mapping[int, str]) -> list[str]:
        """What differs, byte by byte, between blocks and their contents; empty when nothing does."""
        ...

    def changed_outside(self, block_ids: Sequence[int]) -> list[str]:
        """What changed since `poison` outside the pages of these blocks: other blocks, holes, guards, neighbours."""
        ...


class CacheBackend(Protocol):
    """Nodes over one shared pool."""

    name: str

    def offers(self, deployment: Deployment) -> str:
        """Empty when the backend can do this; else why not, in a few words."""
        ...

    def node(self, deployment: Deployment, rank: int = 0, *, elsewhere: bool = False) -> AbstractContextManager[Node]:
        """A rank with caches of its own; `elsewhere`: in another process."""
        ...

    def lose(self, deployment: Deployment, rank: int, content: str, part: int = 0) -> None:
        """Remove an object of one content that this rank loads, round the connector: of several the `part`-th."""
        ...
