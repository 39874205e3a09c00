"""Lookups end in time, whatever the store does (D15), through either transport."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from clocks import ManualClock
from stores import DictStore

from kvpool_connector.contract.status import Status
from kvpool_connector.lookup import Lookup, StoreLookup
from kvpool_connector.lookup_socket import LookupServer, SocketLookup, socket_path
from kvpool_connector.outage import Outage


@contextmanager
def opened(transport: str, store: DictStore, clock: ManualClock, timeout_s: float, path: Path) -> Iterator[Lookup]:
    """A lookup by one of the transports, closed at the end with every gate open."""
    outage = Outage(clock, 5)
    server = LookupServer(store, path / "lookup") if transport == "socket" else None
    lookup: Lookup = (
        SocketLookup(path / "lookup", outage, timeout_s) if server else StoreLookup(store, outage, timeout_s)
    )
    try:
        yield lookup
    finally:
        for gate in store.gates.values():
            gate.set()
        lookup.close()
        if server:
            server.close()


both = pytest.mark.parametrize("transport", ["store", "socket"])


@both
def test_answers_pass_through(transport: str, tmp_path: Path) -> None:
    store = DictStore()
    store.objects["a"] = b"x"
    with opened(transport, store, ManualClock(), 10, tmp_path) as lookup:
        assert lookup.exist(["a", "b"]) == [Status.OK, Status.MISS]
        assert lookup.exist([]) == []
        assert lookup.exist([f"k{i}" for i in range(5000)]) == [Status.MISS] * 5000


@both
def test_d15_a_hung_store_costs_one_limit_and_then_nothing(transport: str, tmp_path: Path) -> None:
    store = DictStore()
    store.gates["exist"] = threading.Event()
    with opened(transport, store, ManualClock(), 0.05, tmp_path) as lookup:
        assert lookup.exist(["a"]) == [Status.TIMEOUT]
        assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
        assert len(store.calls) == 1


def test_a_call_that_still_hangs_is_not_joined_by_another(tmp_path: Path) -> None:
    store, clock = DictStore(), ManualClock()
    store.gates["exist"] = threading.Event()
    with opened("store", store, clock, 0.05, tmp_path) as lookup:
        assert lookup.exist(["a"]) == [Status.TIMEOUT]
        clock.time = 6
        assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
        assert len(store.calls) == 1


@both
def test_the_pool_comes_back_by_itself(transport: str, tmp_path: Path) -> None:
    store, clock = DictStore(), ManualClock()
    with opened(transport, store, clock, 10, tmp_path) as lookup:
        store.answers["exist"] = lambda keys: [Status.UNAVAILABLE] * len(keys)
        assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
        del store.answers["exist"]
        assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
        clock.time = 5
        assert lookup.exist(["a"]) == [Status.MISS]
        assert len(store.calls) == 2


@both
def test_a_store_that_raises_is_an_outage_not_an_error(transport: str, tmp_path: Path) -> None:
    store = DictStore()

    def fail(keys: object) -> list[Status]:
        raise RuntimeError("broken")

    store.answers["exist"] = fail
    with opened(transport, store, ManualClock(), 10, tmp_path) as lookup:
        assert lookup.exist(["a"]) == [Status.UNAVAILABLE]


def test_no_worker_is_a_miss_until_there_is_one(tmp_path: Path) -> None:
    clock = ManualClock()
    lookup = SocketLookup(tmp_path / "lookup", Outage(clock, 5), 1)
    assert lookup.exist(["a"]) == [Status.UNAVAILABLE]
    server = LookupServer(DictStore(), tmp_path / "lookup")
    clock.time = 5
    assert lookup.exist(["a"]) == [Status.MISS]
    lookup.close()
    server.close()
    assert not (tmp_path / "lookup").exists()


@pytest.mark.parametrize(
    "message", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x02\x91\x01", b"\x00"]
)
def test_messages_out_of_form_end_the_connection_and_nothing_else(message: bytes, tmp_path: Path) -> None:
    server = LookupServer(DictStore(), tmp_path / "lookup")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(tmp_path / "lookup"))
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    lookup = SocketLookup(tmp_path / "lookup", Outage(ManualClock(), 5), 10)
    assert lookup.exist(["a"]) == [Status.MISS]
    lookup.close()
    server.close()


def test_the_socket_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    path = socket_path("engine" * 100, 0, 0)
    assert len(str(path)) - len(str(tmp_path)) < 60
    assert path != socket_path("other", 0, 0)
    assert path != socket_path("engine" * 100, 0, 1)
    path.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="mode 700"):
        socket_path("engine", 0, 0)
