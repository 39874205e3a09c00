"""Put and get sessions: what is asked of Mooncake, and what its answers mean."""

from __future__ import annotations

from typing import Any

import pytest
from test_mooncake import Scripted, connected

from kvpool_connector.contract.status import Status

START, PUT, GET = "batch_put_session_start", "batch_put_from_multi_buffer_ranges", "batch_get_into_multi_buffer_ranges"
KEYS = ("a", "b")
ROWS = [[1, 2], [3]], [[10, 20], [30]], [[0, 10], [5]]
"""Addresses, sizes and offsets of the pieces of two objects."""


@pytest.mark.parametrize(
    ("method", "call", "more"),
    [
        ("begin_put", START, ((7, 8),)),
        ("end_put", "batch_put_session_end", ()),
        ("revoke_put", "batch_put_session_revoke", ()),
        ("begin_get", "batch_get_session_start", ()),
    ],
)
def test_a_session_is_one_call_with_one_status_a_key(method: str, call: str, more: tuple[Any, ...]) -> None:
    client = Scripted(**{call: [0, -704]})
    assert getattr(connected(client), method)(KEYS, *more) == [Status.OK, Status.MISS]
    name, arguments = client.calls[-1]
    assert (name, arguments[: 1 + len(more)]) == (call, (["a", "b"], *(list(one) for one in more)))
    client.answers[call] = [0]
    assert getattr(connected(client), method)(KEYS, *more) == [Status.UNAVAILABLE] * 2


def test_a_session_is_placed_as_a_put_is() -> None:
    client = Scripted(batch_put_session_start=[0], batch_put_from_multi_buffers=[0])
    store = connected(client)
    store.begin_put(["k"], [1])
    store.put(["k"], [[1]], [[1]])
    (_, started), (_, put) = client.calls[-2:]
    assert started[2] is put[3]


def test_the_end_of_reading_is_told() -> None:
    client = Scripted(batch_get_session_end=0)
    connected(client).end_get(KEYS)
    assert client.calls[-1] == ("batch_get_session_end", (["a", "b"],))


@pytest.mark.parametrize(("method", "call"), [("put_ranges", PUT), ("get_ranges", GET)])
@pytest.mark.parametrize(
    ("answers", "statuses"),
    [
        ([30, 30], [Status.OK, Status.OK]),
        ([29, 31], [Status.CORRUPT, Status.CORRUPT]),
        ([0, -707], [Status.CORRUPT, Status.LEASE_EXPIRED]),
        ([30, "30"], [Status.OK, Status.UNAVAILABLE]),
        ([30], [Status.UNAVAILABLE, Status.UNAVAILABLE]),
        (None, [Status.UNAVAILABLE, Status.UNAVAILABLE]),
    ],
)
def test_only_all_bytes_of_a_range_are_a_range(method: str, call: str, answers: Any, statuses: list[Status]) -> None:
    client = Scripted(**{call: answers})
    assert getattr(connected(client), method)(KEYS, *ROWS) == statuses
    assert client.calls[-1] == (call, (["a", "b"], *ROWS))


@pytest.mark.parametrize(("method", "call"), [("put_ranges", PUT), ("get_ranges", GET)])
def test_ranges_are_cut_as_whole_objects_are(method: str, call: str) -> None:
    client = Scripted(**{call: lambda keys, _, sizes, __: [sum(pieces) for pieces in sizes]})
    store = connected(client, max_buffers_per_call=2)
    assert getattr(store, method)(KEYS, *ROWS) == [Status.OK] * 2
    expected = [(call, ([key], *([row[i]] for row in ROWS))) for i, key in enumerate(KEYS)]
    assert client.calls[-2:] == expected


def test_ranges_of_nothing_are_no_call() -> None:
    client = Scripted()
    assert connected(client).put_ranges([], [], [], []) == []
    assert [name for name, _ in client.calls] == ["setup"]
