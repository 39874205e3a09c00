"""Whatever a backend does, the suite ends in a failed test that names the cause."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool_conformance.cases import Deployment
from kvpool_conformance.suites import CacheRoundTrip, StoreConformance
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces

Answer = Callable[..., Any]


class ToyStore:
    """A right store in a dict; `answers` replace what a call returns."""

    def __init__(self, objects: dict[str, bytes], answers: Mapping[str, Answer]) -> None:
        self._objects = objects
        for name, answer in answers.items():
            setattr(self, name, answer)

    def register(self, address: int, num_bytes: int) -> Status:
        return Status.OK

    def unregister(self, address: int) -> Status:
        return Status.OK

    def exist(self, keys: Sequence[str]) -> list[Status]:
        return [Status.OK if key in self._objects else Status.MISS for key in keys]

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        for key, places, lengths in zip(keys, addresses, sizes, strict=True):
            value = b"".join(ctypes.string_at(a, n) for a, n in zip(places, lengths, strict=True))
            self._objects.setdefault(key, value)
        return [Status.OK] * len(keys)

    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return [self._get(*one) for one in zip(keys, addresses, sizes, strict=True)]

    def _get(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> Status:
        value = self._objects.get(key)
        if value is None:
            return Status.MISS
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, value[:size], len(value[:size]))
            value = value[size:]
        return Status.OK

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return [Status.MISS if self._objects.pop(key, None) is None else Status.OK for key in keys]

    def write(self, key: str, value: bytes, *, pinned: bool = False) -> Status:
        self._objects.setdefault(key, value)
        return Status.OK

    def read(self, key: str) -> tuple[Status, bytes]:
        return (Status.OK, self._objects[key]) if key in self._objects else (Status.MISS, b"")

    def close(self) -> None:
        """Nothing to give back."""


class ToyNode:
    """A right node: a block holds the content that was put there."""

    def __init__(self, pool: set[str], answers: Mapping[str, Answer]) -> None:
        self._pool = pool
        self._blocks: dict[int, str] = {}
        for name, answer in answers.items():
            setattr(self, name, answer)

    def fill(self, contents: Mapping[int, str]) -> None:
        self._blocks.update(contents)

    def save(self, contents: Mapping[int, str]) -> int:
        self._pool.update(contents.values())
        return len(contents)

    def hits(self, contents: Sequence[str]) -> int:
        return next((i for i, content in enumerate(contents) if content not in self._pool), len(contents))

    def load(self, contents: Mapping[int, str]) -> set[int]:
        failed = {block_id for block_id, content in contents.items() if content not in self._pool}
        self._blocks.update((block_id, content) for block_id, content in contents.items() if block_id not in failed)
        return failed

    def poison(self) -> None:
        self._blocks.clear()

    def mismatches(self, contents: Mapping[int, str]) -> list[str]:
        return [f"block {block_id}" for block_id, name in contents.items() if self._blocks.get(block_id) != name]

    def changed_outside(self, block_ids: Sequence[int]) -> list[str]:
        return [f"block {block_id}" for block_id in self._blocks if block_id not in block_ids]


class Toy:
    """Both backends in one, with a short limit."""

    name = "toy"
    lease_s = 0.0
    call_limit_s = 0.3

    def __init__(self, **answers: Answer) -> None:
        self._objects: dict[str, bytes] = {}
        self._pool: set[str] = set()
        self._answers = answers

    @contextmanager
    def open(self) -> Iterator[ToyStore]:
        yield ToyStore(self._objects, self._answers)

    @contextmanager
    def node(self, deployment: Deployment, rank: int = 0, *, elsewhere: bool = False) -> Iterator[ToyNode]:
        yield ToyNode(self._pool, self._answers)

    def peek(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def poke(self, key: str, offset: int, value: bytes) -> None:
        raise NotImplementedError

    def advance(self, seconds: float) -> None:
        """No time in here."""

    def offers(self, deployment: Deployment) -> str:
        return "" if deployment.transfer != "direct" else "no direct transfer"

    def lose(self, deployment: Deployment, rank: int, content: str) -> None:
        self._pool.remove(content)


def hang(*arguments: object, **named: object) -> object:
    threading.Event().wait()
    raise AssertionError("never reached")


def fail(*arguments: object, **named: object) -> object:
    raise ValueError("out of order")


BAD_STORES: dict[str, tuple[dict[str, Answer], str]] = {
    "get hangs": ({"get": hang}, r"store\.get did not return within 0\.3 s"),
    "put hangs": ({"put": hang}, r"store\.put did not return within 0\.3 s"),
    "register hangs": ({"register": hang}, r"store\.register did not return within 0\.3 s"),
    "get raises": ({"get": fail}, r"store\.get raised ValueError: out of order"),
    "get returns None": (
        {"get": lambda *_: None},
        r"store\.get returned None, a NoneType; expected a list of statuses",
    ),
    "get returns too few": ({"get": lambda *_: []}, r"store\.get returned 0 statuses for 1 keys"),
    "get returns too many": ({"get": lambda *_: [Status.OK] * 2}, r"store\.get returned 2 statuses for 1 keys"),
    "get returns codes": ({"get": lambda *_: [0]}, r"store\.get returned 0, a int; expected one Status a key"),
    "exist returns truth": ({"exist": lambda *_: [True]}, r"store\.exist returned True, a bool; expected one Status"),
    "register returns None": ({"register": lambda *_: None}, r"store\.register returned None"),
}


@pytest.mark.parametrize("fault", BAD_STORES)
def test_a_bad_store_fails_with_its_cause(fault: str) -> None:
    answers, words = BAD_STORES[fault]
    suite = StoreConformance()
    suite.test_another_client_reads_the_same(Toy())  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=words):
        suite.test_another_client_reads_the_same(Toy(**answers))  # type: ignore[arg-type]


BAD_NODES: dict[str, tuple[dict[str, Answer], str]] = {
    "load hangs": ({"load": hang}, r"node\.load did not return within 0\.3 s"),
    "save raises": ({"save": fail}, r"node\.save raised ValueError: out of order"),
    "load returns None": ({"load": lambda *_: None}, r"node\.load returned None"),
    "load reports strangers": (
        {"load": lambda *_: {99}},
        r"node\.load reports blocks \[99\], which were not asked for",
    ),
    "mismatches returns None": ({"mismatches": lambda *_: None}, r"node\.mismatches returned None"),
    "nothing is compared": ({"changed_outside": lambda *_: False}, r"node\.changed_outside returned False"),
    "save returns None": ({"save": lambda *_: None}, r"node\.save returned None"),
    "save counts more than there are": ({"save": lambda *_: 99}, r"node\.save returned 99 for 4 blocks"),
    "save says True": ({"save": lambda *_: True}, r"node\.save returned True, a bool"),
}


@pytest.mark.parametrize("fault", BAD_NODES)
def test_a_bad_node_fails_with_its_cause(fault: str) -> None:
    answers, words = BAD_NODES[fault]
    suite = CacheRoundTrip()
    suite.test_layout_in_one_process(Toy(), "mla", "packed")
    with pytest.raises(AssertionError, match=words):
        suite.test_layout_in_one_process(Toy(**answers), "mla", "packed")


def test_nothing_is_asked_after_a_call_that_hangs() -> None:
    """A second call would meet whatever the first one still does."""
    calls: list[str] = []

    def get(*arguments: object) -> object:
        calls.append("get")
        return hang()

    backend = Toy(get=get, unregister=lambda *_: calls.append("unregister"))
    with pytest.raises(AssertionError, match=r"store\.get did not return"):
        StoreConformance().test_missing_objects(backend)  # type: ignore[arg-type]
    assert calls == ["get"]


def test_what_is_not_offered_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="not offered: no direct transfer"):
        CacheRoundTrip().test_layout_in_one_process(Toy(), "mla", "direct")
    with pytest.raises(pytest.skip.Exception, match="not offered: poke"):
        StoreConformance().test_a_changed_object_is_not_served_from_elsewhere(Toy())  # type: ignore[arg-type]
    with pytest.raises(pytest.skip.Exception, match="not offered: leases"):
        StoreConformance().test_a_lease_forbids_removal_until_it_ends(Toy())  # type: ignore[arg-type]


def test_a_backend_that_cannot_be_opened_fails() -> None:
    backend = Toy()
    backend.open = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(AssertionError, match=r"backend\.open raised ValueError: out of order"):
        StoreConformance().test_empty_batches(backend)  # type: ignore[arg-type]
