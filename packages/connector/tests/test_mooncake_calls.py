"""What reaches Mooncake: the very keys, addresses and sizes, on a client that moves real bytes and is strict."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool_connector import mooncake
from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.contract.errors import StoreSetupError
from kvpool_connector.contract.status import Status
from kvpool_connector.mooncake import TRANSPORT_LIMITS, MooncakeStore, import_mooncake

SETTINGS = StoreSettings(
    master_server_address="127.0.0.1:1",
    protocol="tcp",
    local_hostname="here",
    metadata_server="P2PHANDSHAKE",
    global_segment_size=64 << 20,
    local_buffer_size=2 << 20,
    device_name="dev0",
)


class Client:
    """Objects in a dict, moved only from and to memory that is registered as a whole."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.registered: dict[int, int] = {}
        self.leased: set[str] = set()
        self.setup_arguments: tuple[Any, ...] = ()
        self.placements: list[Any] = []

    def setup(self, *arguments: Any, **more: Any) -> int:
        self.setup_arguments = (*arguments, *more.items())
        return 0

    def close(self) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        assert address > 0 < size, "registered nothing"
        self.registered[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else -600

    def _check(self, address: int, size: int) -> None:
        assert any(start <= address and address + size <= start + n for start, n in self.registered.items())

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in keys]

    def batch_put_from_multi_buffers(self, keys: list[str], addresses: Any, sizes: Any, placement: Any) -> list[int]:
        self.placements.append(placement)
        for key, pieces, lengths in zip(keys, addresses, sizes, strict=True):
            for address, size in zip(pieces, lengths, strict=True):
                self._check(address, size)
            self.objects[key] = b"".join(ctypes.string_at(a, n) for a, n in zip(pieces, lengths, strict=True))
        return [0] * len(keys)

    def batch_get_into_multi_buffers(self, keys: list[str], addresses: Any, sizes: Any) -> list[int]:
        for key, pieces, lengths in zip(keys, addresses, sizes, strict=True):
            start = 0
            for address, size in zip(pieces, lengths, strict=True):
                self._check(address, size)
                part = self.objects[key][start : start + size]
                ctypes.memmove(address, part, len(part))
                start += size
        return [len(self.objects[key]) for key in keys]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [self._remove(key, force) for key in keys]

    def _remove(self, key: str, force: bool) -> int:
        if key in self.leased and not force:
            return -706
        return 0 if self.objects.pop(key, None) is not None else -704

    def get_size(self, key: str) -> int:
        return len(self.objects[key]) if key in self.objects else -704


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def store(client: Client) -> Iterator[MooncakeStore]:
    module = types.SimpleNamespace(
        MooncakeDistributedStore=lambda: client, ReplicateConfig=lambda: types.SimpleNamespace(preferred_segment="")
    )
    made = MooncakeStore(SETTINGS, PoolSettings(max_buffers_per_call=4), module=module)
    made.connect()
    yield made
    made.close()


def test_setup_is_told_what_was_configured(store: MooncakeStore, client: Client) -> None:
    expected = ("here", "P2PHANDSHAKE", 64 << 20, 2 << 20, "tcp", "dev0", "127.0.0.1:1")
    assert client.setup_arguments == expected


@pytest.mark.parametrize(("master", "own"), [("127.0.0.1:1", "127.0.0.1"), ("localhost:1", "127.0.0.1")])
def test_the_own_address_is_the_one_on_the_way_to_the_master(client: Client, master: str, own: str) -> None:
    settings = SETTINGS.model_copy(update={"local_hostname": "", "master_server_address": master})
    module = types.SimpleNamespace(MooncakeDistributedStore=lambda: client, ReplicateConfig=types.SimpleNamespace)
    MooncakeStore(settings, module=module).connect()
    assert client.setup_arguments[0] in (own, "::1")


def test_the_way_asked_about_is_the_one_to_the_master(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *way, **more: (asked.append(way), find(*way, **more))[1])
    settings = SETTINGS.model_copy(update={"local_hostname": "", "master_server_address": "127.0.0.1:17"})
    module = types.SimpleNamespace(MooncakeDistributedStore=lambda: client, ReplicateConfig=types.SimpleNamespace)
    MooncakeStore(settings, module=module).connect()
    assert asked == [("127.0.0.1", 17)]


def test_no_way_to_the_master_is_said_with_the_remedy(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    settings = SETTINGS.model_copy(update={"local_hostname": "", "master_server_address": "nowhere:1"})
    with pytest.raises(
        StoreSetupError, match=r"nowhere:1 \(Name or service not known\); correct master_.*or set local_h"
    ):
        MooncakeStore(settings, module=types.SimpleNamespace(MooncakeDistributedStore=lambda: client)).connect()


def test_a_tenant_is_handed_on_only_when_there_is_one(client: Client) -> None:
    module = types.SimpleNamespace(MooncakeDistributedStore=lambda: client, ReplicateConfig=types.SimpleNamespace)
    settings = SETTINGS.model_copy(update={"preferred_segment": False})
    MooncakeStore(settings, module=module).connect()
    assert len(client.setup_arguments) == 7
    MooncakeStore(settings.model_copy(update={"tenant_id": "a"}), module=module).connect()
    assert client.setup_arguments[7:] == (("tenant_id", "a"),)


@pytest.mark.parametrize("same_node", [True, False])
def test_placement_is_as_configured(client: Client, same_node: bool) -> None:
    module = types.SimpleNamespace(MooncakeDistributedStore=lambda: client, ReplicateConfig=types.SimpleNamespace)
    settings = SETTINGS.model_copy(update={"prefer_alloc_in_same_node": same_node, "preferred_segment": False})
    store = MooncakeStore(settings, module=module)
    store.connect()
    assert store.write("k", b"v").ok
    (placement,) = client.placements
    assert vars(placement) == {"prefer_alloc_in_same_node": same_node}
    assert store.write("kept", b"v", pinned=True).ok
    assert vars(client.placements[1]) == {"with_hard_pin": True}


def test_pieces_make_up_objects_over_several_calls(store: MooncakeStore, client: Client) -> None:
    memory = ctypes.create_string_buffer(bytes(range(64)), 64)
    base = ctypes.addressof(memory)
    assert store.register(base, 64).ok
    assert client.registered == {base: 64}
    keys = ["a", "b", "c"]
    addresses = [[base + 10 * i, base + 10 * i + 5, base + 40] for i in range(3)]
    sizes = [[5, 3, i + 1] for i in range(3)]
    assert store.put(keys, addresses, sizes) == [Status.OK] * 3
    for i, key in enumerate(keys):
        assert client.objects[key] == bytes([*range(10 * i, 10 * i + 8), *range(40, 41 + i)])
    ctypes.memset(base, 0, 64)
    assert store.get(keys, [*addresses[:2], [base + 20, base + 25, base + 50]], sizes) == [Status.OK] * 3
    assert memory.raw[:8] == bytes(range(8))
    assert memory.raw[20:28] == bytes(range(20, 28))
    assert memory.raw[50:53] == bytes([40, 41, 42])
    assert store.exist(["a", "x", "c"]) == [Status.OK, Status.MISS, Status.OK]
    assert store.unregister(base).ok
    assert client.registered == {}
    assert not store.unregister(base).ok


def test_removing_respects_leases_unless_forced(store: MooncakeStore, client: Client) -> None:
    client.objects = {"a": b"1", "b": b"2", "c": b"3"}
    client.leased = {"a", "c"}
    assert store.remove(["a", "b", "x"]) == [Status.LEASED, Status.OK, Status.MISS]
    assert store.remove(["a"], force=True) == [Status.OK]
    assert list(client.objects) == ["c"]


@pytest.mark.parametrize("value", [b"v", b"\0", b"one\0two", b"x" * 5000])
def test_small_values_come_back_and_leave_nothing_registered(
    store: MooncakeStore, client: Client, value: bytes
) -> None:
    assert store.write("k", value) == Status.OK
    assert client.objects == {"k": value}
    assert store.read("k") == (Status.OK, value)
    assert client.registered == {}


def test_small_values_that_are_not_there_or_empty(store: MooncakeStore, client: Client) -> None:
    assert store.read("k") == (Status.MISS, b"")
    client.objects["k"] = b""
    assert store.read("k") == (Status.CORRUPT, b"")


def test_a_value_that_shrinks_between_size_and_read_is_not_believed(store: MooncakeStore, client: Client) -> None:
    client.objects["k"] = b"short"
    client.get_size = lambda key: 10  # type: ignore[method-assign]
    assert store.read("k") == (Status.CORRUPT, b"")
    client.get_size = lambda key: None  # type: ignore[method-assign, assignment, return-value]
    assert store.read("k") == (Status.UNAVAILABLE, b"")


def test_what_cannot_be_registered_is_not_moved(store: MooncakeStore, client: Client) -> None:
    client.register_buffer = lambda address, size: -900  # type: ignore[method-assign]
    client.objects["old"] = b"v"
    assert store.write("k", b"v") == Status.UNAVAILABLE
    assert store.read("old") == (Status.UNAVAILABLE, b"")
    assert "k" not in client.objects


def test_mooncakes_own_waits_are_bounded_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("mooncake.store")
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", fake)
    for name in TRANSPORT_LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "77")
    assert import_mooncake() is fake
    assert {name: os.environ[name] for name in TRANSPORT_LIMITS} == {**TRANSPORT_LIMITS, "MC_RPC_TIMEOUT_MS": "77"}
    for name in TRANSPORT_LIMITS:
        monkeypatch.delenv(name)


def test_a_missing_mooncake_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StoreSetupError, match=r"pip install kvpool-connector\[mooncake\].*apt-get install libibverbs1"):
        MooncakeStore(SETTINGS).connect()


@pytest.fixture
def real_module(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Mooncake's module is this client's: the path of production, where the master is asked first."""
    module = types.SimpleNamespace(MooncakeDistributedStore=lambda: client, ReplicateConfig=types.SimpleNamespace)
    monkeypatch.setattr(mooncake, "import_mooncake", lambda: module)
    return client


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_master_that_listens_is_found(real_module: Client, host: str) -> None:
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), 0), family=family)
    except OSError:
        assert family == socket.AF_INET6, "no loopback"
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        address = f"{host}:{listener.getsockname()[1]}"
        MooncakeStore(SETTINGS.model_copy(update={"master_server_address": address})).connect()
    assert real_module.setup_arguments[-1] == address


def test_a_master_that_does_not_listen_is_named_before_anything_is_set_up(real_module: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    settings = SETTINGS.model_copy(update={"master_server_address": f"127.0.0.1:{port}"})
    with pytest.raises(StoreSetupError, match=rf"answers at 127\.0\.0\.1:{port}.*mooncake_master --rpc_port {port}`"):
        MooncakeStore(settings).connect()
    assert real_module.setup_arguments == ()


def test_the_probe_is_bounded(real_module: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []

    def silent(address: tuple[str, int], timeout: float) -> Any:
        limits.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    with pytest.raises(StoreSetupError, match="timed out"):
        MooncakeStore(SETTINGS, PoolSettings(setup_timeout_s=1.5)).connect()
    assert limits == [1.5]


def test_setup_runs_beside_the_caller_and_does_not_keep_the_process(
    client: Client, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    client.setup = lambda *_: seen.append(threading.current_thread().daemon) or 0  # type: ignore[method-assign, func-returns-value]
    store.connect()
    assert seen == [True]
