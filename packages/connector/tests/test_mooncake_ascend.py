"""Protocol `ascend`: which calls Mooncake gets, in threads that have selected the device, and what is refused before.

What the transport makes of them is tested on the stand-in (tests/npu).
"""

from __future__ import annotations

import logging
import resource
import threading
import types
from typing import Any

import pytest
from test_mooncake import Scripted, module_of

from kvpool_connector.config import GIB, MIB, StoreSettings
from kvpool_connector.contract.errors import StoreClosedError, StoreSetupError
from kvpool_connector.contract.layout import Region
from kvpool_connector.contract.status import Status
from kvpool_connector.mooncake import MAX_CACHE_REGIONS, MooncakeStore, memory_to_lock

ASCEND = StoreSettings(
    master_server_address="127.0.0.1:1",
    local_hostname="10.0.0.7",
    protocol="ascend",
    device_name="npu",
    global_segment_size=64 * MIB,
    local_buffer_size=16 * MIB,
)
FABRIC = ASCEND.model_copy(update={"fabric_memory": True, "global_segment_size": GIB})
REGIONS = [Region(2 * MIB, 5), Region(4 * MIB, 7)]


class Client(Scripted):
    """Notes keyword arguments of `setup` and the thread of every call."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(register_buffer=0, unregister_buffer=0, batch_is_exist=[1], **answers)
        self.keywords: dict[str, Any] = {}
        self.threads: dict[str, int] = {}

    def setup(self, *arguments: Any, **keywords: Any) -> Any:
        self.keywords = keywords
        self.threads["setup"] = threading.get_ident()
        return self.__getattr__("setup")(*arguments)


class Shared:
    """A process's engine."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.asked: list[tuple[str, str | None]] = []
        self.registered: list[tuple[list[int], list[int]]] = []

    def get_transfer_engine(self, hostname: str, device_name: str | None) -> Any:
        self.asked.append((hostname, device_name))
        return types.SimpleNamespace(get_rpc_port=lambda: 16001, get_engine=lambda: "the engine")

    def register_buffer(self, ptrs: list[int], sizes: list[int]) -> None:
        if self.fails:
            raise RuntimeError("no room")
        self.registered.append((ptrs, sizes))


def connected(client: Client, settings: StoreSettings = ASCEND, **more: Any) -> MooncakeStore:
    store = MooncakeStore(settings, module=module_of(client), **more)
    store.connect()
    return store


def test_without_another_connector_mooncake_makes_its_own_engine() -> None:
    client = Client()
    connected(client)
    assert client.keywords == {}
    arguments = ("10.0.0.7", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "ascend", "npu", "127.0.0.1:1")
    assert client.calls == [("setup", arguments)]


def test_a_shared_engine_is_handed_over_under_its_own_port() -> None:
    client, shared = Client(), Shared()
    store = connected(client, ASCEND.model_copy(update={"tenant_id": "a"}), engine=shared)
    assert shared.asked == [("10.0.0.7", None)]
    assert client.calls[0][1][0] == "10.0.0.7:16001"
    assert client.keywords == {"engine": "the engine", "tenant_id": "a"}
    assert store.register_shared(REGIONS)
    assert shared.registered == [([2 * MIB, 4 * MIB], [5, 7])]
    assert store.register(1, 2) is Status.OK, "other memory than the cache is this store's own"
    assert client.calls[-1] == ("register_buffer", (1, 2))


def test_an_engine_that_refuses_the_cache_is_told() -> None:
    store = connected(Client(), engine=Shared(fails=True))
    with pytest.raises(StoreSetupError, match=r"^the shared transfer engine did not register the KV cache: no room$"):
        store.register_shared(REGIONS)


def test_fabric_memory_registers_nothing_has_no_buffer_and_no_shared_engine() -> None:
    client, shared = Client(), Shared()
    store = connected(client, FABRIC, engine=shared)
    assert client.calls[0][1][:4] == ("10.0.0.7", "P2PHANDSHAKE", GIB, 0)
    assert client.keywords == {}
    assert [store.register(1, 1), store.unregister(1)] == [Status.OK, Status.OK]
    assert not store.register_shared([Region(1, 1)] * 1000)
    assert len(client.calls) == 1
    assert not shared.asked


@pytest.mark.parametrize("call", ["register", "unregister", "register_shared"])
def test_nothing_is_registered_before_connect(call: str) -> None:
    arguments = {"register": (1, 1), "unregister": (1,), "register_shared": ([],)}[call]
    with pytest.raises(StoreClosedError):
        getattr(MooncakeStore(FABRIC, module=module_of(Client())), call)(*arguments)


def test_every_thread_that_calls_selects_the_device_first() -> None:
    bound: set[int] = set()
    client = Client(close=lambda: bound.add(-1) if threading.get_ident() in bound else None)
    store = connected(client, bind_thread=lambda: bound.add(threading.get_ident()))
    assert client.threads["setup"] in bound
    assert client.threads["setup"] != threading.get_ident()
    bound.clear()
    for call in (lambda: store.exist(["k"]), lambda: store.register(1, 1), store.close):
        call()
        assert threading.get_ident() in bound
        bound.discard(threading.get_ident())
    assert -1 in bound, "close() is a call too"
    store.close()
    assert threading.get_ident() not in bound, "what is closed needs no device"


def test_an_error_of_the_setting_up_is_told() -> None:
    def bind() -> None:
        raise RuntimeError("no device")

    with pytest.raises(StoreSetupError, match=r"Mooncake's setup returned RuntimeError\('no device'\)"):
        connected(Client(), bind_thread=bind)


def test_regions_that_the_transport_would_refuse_are_refused_in_words() -> None:
    store = connected(Client())
    many = [Region((i + 1) * 2 * MIB, 1) for i in range(MAX_CACHE_REGIONS + 1)]
    assert not store.register_shared(many[:-1])
    with pytest.raises(
        StoreSetupError,
        match=r"^the KV cache lies in 249 regions of memory; protocol 'ascend' takes at most 248\. Set transfer to "
        r'"packed", which registers the staging area alone$',
    ):
        store.register_shared(many)
    with pytest.raises(
        StoreSetupError,
        match=r"^a region of the KV cache starts at 0x200001; with protocol 'ascend' it has to start on a multiple of "
        r'2 MiB\. Set transfer to "packed"; staging memory is aligned$',
    ):
        store.register_shared([Region(2 * MIB, 1), Region(2 * MIB + 1, 1)])


def test_other_protocols_take_any_region() -> None:
    for protocol in ("tcp", "rdma"):
        store = connected(Client(), ASCEND.model_copy(update={"protocol": protocol}))
        assert not store.register_shared([Region(1, 1)] * 300)


def test_what_is_locked() -> None:
    assert memory_to_lock(ASCEND) == 80 * MIB
    assert memory_to_lock(ASCEND.model_copy(update={"protocol": "rdma"})) == 80 * MIB
    assert memory_to_lock(ASCEND.model_copy(update={"protocol": "tcp"})) == memory_to_lock(FABRIC) == 0


@pytest.mark.parametrize(("limit", "told"), [(80 * MIB, False), (80 * MIB - 1, True), (resource.RLIM_INFINITY, False)])
def test_the_limit_on_locked_memory_is_looked_at_first(
    limit: int, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (limit, -1)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    with caplog.at_level(logging.WARNING):
        connected(Client())
    words = (
        f"the limit on locked memory is {limit} bytes, and {80 * MIB} are to be registered (global_segment_size + "
        "local_buffer_size); raise it: `ulimit -l unlimited`, in containers `--ulimit memlock=-1`"
    )
    assert [record.getMessage() for record in caplog.records] == [f"event=locked_memory: {words}"] * told
    with pytest.raises(StoreSetupError) as error:
        connected(Client(setup=-1))
    ending = "that the machine has the memory"
    assert str(error.value).endswith(f"{ending}; {words}" if told else ending)
