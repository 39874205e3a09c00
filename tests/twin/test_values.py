"""Objects as Python's bytes, and replacing them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests.twin.world import LEASE_S, Memory, World, get, holding, put

claim = pytest.mark.claim
MIB = 1 << 20


@claim("value-kinds", "put takes bytes, bytearray and memoryview, and raises TypeError for str")
def test_value_kinds(world: Any) -> None:
    for value in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        key = world.key()
        assert world.a.put(key, value) == 0
        assert world.b.get(key) == b"abc"
    with pytest.raises(TypeError):
        world.a.put(world.key(), "abc")


@claim("value-items", "of an array with items of several bytes, put stores as many bytes as there are items")
def test_value_items(world: Any) -> None:
    key = world.key()
    assert world.a.put(key, array("i", [1, 2, 3, 4])) == 0
    assert world.b.get(key) == array("i", [1]).tobytes()


@claim("put-batch", "put_batch gives one code; get_batch gives empty bytes for what is missing, [b''] for no keys")
def test_put_batch(world: Any) -> None:
    one, two = world.key(), world.key()
    assert world.a.put_batch([one, two], [b"x", b"yy"]) == 0
    assert world.b.get_batch([one, world.key(), two]) == [b"x", b"", b"yy"]
    assert world.b.get_batch([]) == [b""]
    assert world.a.put_batch([], []) == 0


@claim("put-batch-bad", "put_batch with an empty value or unequal lists: -600, nothing stored")
def test_put_batch_bad(world: Any) -> None:
    keys = [world.key(), world.key()]
    assert world.a.put_batch(keys, [b"x"]) == -600
    assert world.a.put_batch(keys, [b"x", b""]) == -600
    assert world.b.batch_is_exist(keys) == [0, 0]


@claim("put-batch-partly", "put_batch with an empty key: -600, the other objects are stored")
def test_put_batch_partly(world: Any) -> None:
    key = world.key()
    assert world.a.put_batch([key, ""], [b"x", b"y"]) == -600
    assert world.b.is_exist(key) == 1


@claim("put-parts", "put_parts joins its parts; without bytes it returns 0 and stores nothing")
def test_put_parts(world: Any) -> None:
    key, empty = world.key(), world.key()
    assert world.a.put_parts(key, b"ab", b"", b"cd") == 0
    assert world.b.get(key) == b"abcd"
    assert (world.a.put_parts(empty), world.a.put_parts(empty, b""), world.a.put_parts("", b"x")) == (0, 0, -600)
    assert world.b.is_exist(empty) == 0


@claim("put-from-nothing", "put_from and upsert_from with size 0 return 0 and store nothing; the batch forms give -600")
def test_put_from_nothing(world: Any) -> None:
    key, memory = world.key(), Memory(8)
    assert (world.a.put_from(key, memory.address, 0), world.a.upsert_from(key, memory.address, 0)) == (0, 0)
    assert world.a.batch_put_from([key], [memory.address], [0]) == [-600]
    assert world.a.batch_upsert_from([key], [memory.address], [0]) == [-600]
    assert world.b.is_exist(key) == 0


@claim("local-buffer", "values pass through the local buffer: larger ones, or any without a buffer, are refused")
def test_local_buffer(fresh_world: World) -> None:
    owner, without = fresh_world.client(64 * MIB, 1 * MIB), fresh_world.client(0, 0)
    large = holding(bytes(2 * MIB))
    assert owner.put("large", bytes(2 * MIB)) == -600
    assert owner.put_from("large", large.address, 2 * MIB) == 0
    assert (owner.get("large"), owner.get_buffer("large")) == (b"", None)
    assert owner.put("small", b"x") == 0
    assert (without.put("k", b"x"), without.upsert("k", b"x"), without.put_batch(["k"], [b"x"])) == (-600, -600, -600)
    assert (without.get("small"), without.get_buffer("small"), without.get_batch(["small"])) == (b"", None, [b""])


@claim("get-buffer", "get_buffer gives a writable view of the bytes, None for what is missing")
def test_get_buffer(world: Any) -> None:
    key = world.key()
    assert world.a.put(key, b"abcd") == 0
    handle = world.b.get_buffer(key)
    assert (handle.size(), len(handle), bytes(handle), memoryview(handle).readonly) == (4, 4, b"abcd", False)
    assert world.b.get_buffer(world.key()) is None
    assert [one and bytes(one) for one in world.b.batch_get_buffer([key, world.key()])] == [b"abcd", None]


@claim("upsert-values", "upsert, upsert_parts and upsert_batch insert and replace")
def test_upsert_values(world: Any) -> None:
    one, two = world.key(), world.key()
    assert (world.a.upsert(one, b"first"), world.a.upsert(one, b"second")) == (0, 0)
    assert world.b.get(one) == b"second"
    assert (world.a.upsert_parts(one, b"a", b"bc"), world.b.get(one)) == (0, b"abc")
    assert (world.a.upsert_batch([one, two], [b"x", b"yy"]), world.b.get_batch([one, two])) == (0, [b"x", b"yy"])


@claim("upsert-bad", "upsert without key or bytes: -600; upsert_parts without bytes: 0, unchanged; unequal lists: -600")
def test_upsert_bad(world: Any) -> None:
    key, memory = world.key(), Memory(4)
    assert world.a.put(key, b"old") == 0
    assert (world.a.upsert("", b"x"), world.a.upsert(key, b""), world.a.upsert_parts(key)) == (-600, -600, 0)
    assert world.a.batch_upsert_from([key, "", world.key()], [memory.address], [4]) == [-600] * 3
    assert world.b.get(key) == b"old"


@claim("upsert-duplicate", "a key named twice in one upsert: 0 for both, the last one's bytes and size stay")
def test_upsert_duplicate(world: Any) -> None:
    for sizes in ([3, 3], [3, 4], [4, 2]):
        key, memory = world.key(), holding(b"0123456789")
        assert world.a.batch_upsert_from([key, key], [memory.address, memory.address + 5], sizes) == [0, 0]
        assert world.b.get(key) == b"56789"[: sizes[1]]


@claim("upsert-lease", "upsert of the same size keeps the lease; of another size it ends it; it grants none itself")
def test_upsert_lease(world: Any) -> None:
    same, other, fresh = world.key(), world.key(), world.key()
    for key in (same, other):
        assert world.a.put(key, b"1234") == 0
        assert world.b.is_exist(key) == 1
    assert (world.a.upsert(same, b"4321"), world.a.remove(same)) == (0, -706)
    assert (world.a.upsert(other, b"432"), world.a.remove(other)) == (0, 0)
    assert (world.a.upsert(fresh, b"1"), world.a.remove(fresh)) == (0, 0)


@claim("upsert-takes-over", "upsert takes over another's unfinished write; that writer's end and revoke give -601")
def test_upsert_takes_over(world: Any) -> None:
    key, source = world.key(), holding(b"zz")
    assert world.a.batch_put_session_start([key], [5]) == [0]
    assert (world.b.upsert(key, b"hello"), world.b.get(key)) == (0, b"hello")
    rows = [[source.address]], [[2]], [[0]]
    # Written beside the object that took its place.
    assert world.a.batch_put_from_multi_buffer_ranges([key], *rows) == [2]
    assert world.a.batch_put_session_end([key]) == [-601]
    assert world.a.batch_put_from_multi_buffer_ranges([key], *rows) == [-600]
    assert (world.a.batch_put_session_revoke([key]), world.a.batch_put_session_start([key], [5])) == ([-601], [-600])
    assert world.b.get(key) == b"hello"


@claim("upsert-own", "upsert of one's own unfinished write: the session's end gives 0; a revoke instead gives -700")
def test_upsert_own(world: Any) -> None:
    for finish, code in (("batch_put_session_end", 0), ("batch_put_session_revoke", -700)):
        key = world.key()
        assert world.a.batch_put_session_start([key], [5]) == [0]
        assert world.a.upsert(key, b"hello") == 0
        assert getattr(world.a, finish)([key]) == [code]
        assert world.b.get(key) == b"hello"


@claim("upsert-in-place", "upsert of the same size writes in place: an open get session sees the new bytes")
def test_upsert_in_place(world: Any) -> None:
    for value, seen in ((b"abcde", b"abcde"), (b"other size", b"12345")):
        key, target = world.key(), Memory(5)
        assert world.a.put(key, b"12345") == 0
        assert world.b.batch_get_session_start([key]) == [0]
        assert world.a.upsert(key, value) == 0
        assert world.b.batch_get_into_multi_buffer_ranges([key], [[target.address]], [[5]], [[0]]) == [5]
        assert target.value == seen


@claim("upsert-no-space", "upsert of another size without space for both: -200, and the old object is gone")
def test_upsert_no_space(make_world: Any) -> None:
    world = make_world(eviction_high_watermark_ratio=1.0)
    client, memory = world.client(16 * MIB), Memory(12 * MIB)
    assert client.put_from("k", memory.address, 10 * MIB) == 0
    assert client.upsert_from("k", memory.address, 12 * MIB) == -200
    assert client.is_exist("k") == 0


@claim(
    "upsert-space", "the space of what an upsert of another size replaced comes back after the release time-out only"
)
def test_upsert_space(fresh_world: World) -> None:
    client, memory = fresh_world.client(16 * MIB), Memory(8 * MIB)
    assert client.put_from("k", memory.address, 5 * MIB) == 0
    assert client.upsert_from("k", memory.address, 4 * MIB) == 0
    fresh_world.advance(2.0)
    assert fresh_world.used_bytes() == 9 * MIB
    fresh_world.advance(16.0)
    assert fresh_world.used_bytes() == 4 * MIB


@claim("upsert-failed", "an upsert whose transfer fails (-800) leaves no object")
def test_upsert_failed(world: Any) -> None:
    key = world.key()
    assert world.a.put(key, b"abc") == 0
    assert world.a.upsert_from(key, 0x10000, 3) == -800
    assert world.b.is_exist(key) == 0


@claim("value-lease", "get, get_buffer and the replicas' description grant leases")
def test_value_lease(world: Any) -> None:
    uses = (
        world.b.get,
        world.b.get_buffer,
        world.b.get_replica_desc,
        lambda key: world.b.batch_get_replica_desc([key]),
    )
    for use in uses:
        key = world.key()
        assert put(world.a, key, b"x") == 0
        use(key)
        assert world.a.remove(key) == -706
        world.advance(LEASE_S * 1.3)
        assert world.a.remove(key) == 0
    assert get(world.a, key, 1)[0] == -704
