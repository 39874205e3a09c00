"""Mooncake's answers become statuses; what would crash it is never called."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.contract.errors import StoreClosedError, StoreSetupError
from kvpool_connector.contract.status import Status
from kvpool_connector.mooncake import STATUS_OF_CODE, MooncakeStore

SETTINGS = StoreSettings(master_server_address="127.0.0.1:1", protocol="tcp", global_segment_size=0)


class Scripted:
    """A client whose every call answers what the test wants and notes its arguments."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {"setup": 0, "close": 0, **answers}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            answer = self.answers[name]
            return answer(*arguments) if callable(answer) else answer

        return call


def module_of(client: Scripted) -> Any:
    """A module like `mooncake.store` whose clients are this one."""
    return types.SimpleNamespace(
        MooncakeDistributedStore=lambda: client, ReplicateConfig=lambda: types.SimpleNamespace(preferred_segment="")
    )


def connected(client: Scripted, **pool: Any) -> MooncakeStore:
    store = MooncakeStore(SETTINGS, PoolSettings(**pool), module=module_of(client))
    store.connect()
    return store


@pytest.mark.parametrize(("code", "status"), [*STATUS_OF_CODE.items(), (-12345, Status.UNAVAILABLE)])
def test_every_code_of_a_put(code: int, status: Status) -> None:
    store = connected(Scripted(batch_put_from_multi_buffers=[code]))
    assert store.put(["k"], [[1]], [[1]]) == [status]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (10, Status.OK),
        (9, Status.CORRUPT),
        (11, Status.CORRUPT),
        (0, Status.CORRUPT),
        (-600, Status.CORRUPT),
        (-704, Status.MISS),
        (-703, Status.NOT_READY),
        (-707, Status.LEASE_EXPIRED),
        (-800, Status.UNAVAILABLE),
        (-901, Status.TIMEOUT),
        (None, Status.UNAVAILABLE),
    ],
)
def test_a12_a27_only_the_exact_size_is_a_read(answer: object, status: Status) -> None:
    store = connected(Scripted(batch_get_into_multi_buffers=[answer]))
    assert store.get(["k"], [[1, 2]], [[4, 6]]) == [status]


@pytest.mark.parametrize("answer", [None, [], [10], [10, 10, 10], 10])
def test_a9_an_answer_of_the_wrong_length_says_nothing_of_any_key(answer: object) -> None:
    client = Scripted(batch_get_into_multi_buffers=answer, batch_put_from_multi_buffers=answer, batch_is_exist=answer)
    store = connected(client)
    unavailable = [Status.UNAVAILABLE] * 2
    assert store.get(["a", "b"], [[1], [1]], [[10], [10]]) == unavailable
    assert store.put(["a", "b"], [[1], [1]], [[10], [10]]) == unavailable
    assert store.exist(["a", "b"]) == unavailable


def test_exist() -> None:
    store = connected(Scripted(batch_is_exist=[1, 0, -900, -901, -12345, None]))
    expected = [Status.OK, Status.MISS, Status.UNAVAILABLE, Status.TIMEOUT, Status.UNAVAILABLE, Status.UNAVAILABLE]
    assert store.exist(list("abcdef")) == expected
    store = connected(Scripted(batch_is_exist=[0, 1, 1]))
    assert store.exist(list("abc")) == [Status.MISS, Status.OK, Status.OK]


def test_calls_are_cut_by_buffers_bytes_and_repeated_keys() -> None:
    client = Scripted(batch_get_into_multi_buffers=lambda keys, _, sizes: [sum(pieces) for pieces in sizes])
    store = connected(client, max_buffers_per_call=4, max_bytes_per_call=100)
    keys = ["a", "b", "c", "d", "d", "e"]
    sizes = [[1, 1], [1, 1], [1], [60], [60], [60]]
    assert store.get(keys, [[1] * len(pieces) for pieces in sizes], sizes) == [Status.OK] * 6
    calls = [arguments[0] for name, arguments in client.calls if name.startswith("batch_get")]
    assert calls == [["a", "b"], ["c", "d"], ["d"], ["e"]]


@pytest.mark.parametrize(
    ("sizes", "cuts"),
    [
        ([[1, 1], [1, 1], [1]], [2, 1]),
        ([[1, 1, 1], [1], [1]], [2, 1]),
        ([[1], [1, 1, 1], [1, 1, 1, 1], [1]], [2, 1, 1]),
        ([[1, 1, 1, 1, 1], [1]], [1, 1]),
        ([[60], [40], [1]], [2, 1]),
        ([[30], [30], [30], [10], [1]], [4, 1]),
        ([[60], [41], [59], [1]], [1, 2, 1]),
        ([[500], [1]], [1, 1]),
        ([[25], [25], [25], [25], [100], [100]], [4, 1, 1]),
        ([[1, 1, 1, 1], [1, 1, 1, 1], [1], [1, 1, 1]], [1, 1, 2]),
    ],
)
def test_calls_are_as_large_as_the_limits_allow(sizes: list[list[int]], cuts: list[int]) -> None:
    client = Scripted(batch_put_from_multi_buffers=lambda keys, *_: [0] * len(keys))
    store = connected(client, max_buffers_per_call=4, max_bytes_per_call=100)
    keys = [f"k{i}" for i in range(len(sizes))]
    assert store.put(keys, sizes, sizes) == [Status.OK] * len(keys)
    calls = [arguments for name, arguments in client.calls if name.startswith("batch_put")]
    assert [len(arguments[0]) for arguments in calls] == cuts
    assert [key for arguments in calls for key in arguments[0]] == keys


def test_a_key_that_is_named_twice_is_asked_for_twice() -> None:
    client = Scripted(batch_get_into_multi_buffers=lambda keys, _, sizes: [sum(pieces) for pieces in sizes])
    store = connected(client)
    assert store.get(["a", "b", "a", "c", "b"], [[1]] * 5, [[1]] * 5) == [Status.OK] * 5
    calls = [arguments[0] for name, arguments in client.calls if name.startswith("batch_get")]
    assert calls == [["a", "b"], ["a", "c", "b"]]


@pytest.mark.parametrize("answer", ["0", [0], None, 0.5])
def test_an_answer_of_another_type_is_no_success(answer: object) -> None:
    store = connected(Scripted(batch_put_from_multi_buffers=[answer], register_buffer=answer))
    assert store.put(["k"], [[1]], [[1]]) == [Status.UNAVAILABLE]
    assert store.register(1, 1) == Status.UNAVAILABLE


def test_nothing_asked_is_no_call() -> None:
    client = Scripted()
    store = connected(client)
    assert store.put([], [], []) == store.get([], [], []) == []
    assert [name for name, _ in client.calls] == ["setup"]


def test_lists_of_different_lengths_are_a_mistake() -> None:
    store = connected(Scripted(batch_put_from_multi_buffers=[0]))
    with pytest.raises(ValueError, match="argument"):
        store.put(["a"], [[1], [1]], [[1], [1]])


def test_calls_before_connect_and_after_close_are_refused() -> None:
    store = MooncakeStore(SETTINGS, module=module_of(Scripted()))
    calls: list[Any] = [
        lambda: store.exist(["k"]),
        lambda: store.put(["k"], [[1]], [[1]]),
        lambda: store.get(["k"], [[1]], [[1]]),
        lambda: store.remove(["k"]),
        lambda: store.register(1, 1),
        lambda: store.unregister(1),
        lambda: store.read("k"),
        lambda: store.write("k", b"v"),
    ]
    for _ in range(2):
        for call in calls:
            with pytest.raises(
                StoreClosedError, match=r"^the Mooncake client is not connected.*nothing after close\(\)$"
            ):
                call()
        store.connect()
        store.close()
        store.close()


def test_setup_that_fails_says_what_to_check() -> None:
    with pytest.raises(StoreSetupError, match=r"returned -1 \(master 127\.0\.0\.1:1.*that this build of Mooncake has"):
        connected(Scripted(setup=-1))


def test_setup_that_hangs_is_given_up_in_time() -> None:
    gate = threading.Event()
    with pytest.raises(StoreSetupError, match=r"did not return within 0\.05 s"):
        connected(Scripted(setup=lambda *_: gate.wait(30)), setup_timeout_s=0.05)
    gate.set()


def test_the_own_segment_is_preferred_only_when_asked_for_and_there() -> None:
    for segment, preferred, expected in ((64 << 20, True, "host:1"), (64 << 20, False, ""), (0, True, "")):
        client = Scripted(get_hostname="host:1", batch_put_from_multi_buffers=[0])
        settings = SETTINGS.model_copy(update={"global_segment_size": segment, "preferred_segment": preferred})
        store = MooncakeStore(settings, module=module_of(client))
        store.connect()
        store.put(["k"], [[1]], [[1]])
        assert client.calls[-1][1][3].preferred_segment == expected
