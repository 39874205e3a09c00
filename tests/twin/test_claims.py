"""What Mooncake does, claim by claim, on the simulated store and on the real one (docs/mooncake-semantics.md)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.twin.world import DISCARD_S, LEASE_S, SEGMENT_BYTES, Memory, World, cut, get, holding, poison, put

claim = pytest.mark.claim
MIB = 1 << 20


@claim("put-get", "what is put is got, cut one way and the other")
def test_put_get(world: Any) -> None:
    key, source, target = world.key(), holding(bytes(range(200))), Memory(200)
    assert world.a.batch_put_from_multi_buffers([key], *[[p] for p in cut(source, 50, 150)]) == [0]
    assert world.b.batch_get_into_multi_buffers([key], *[[p] for p in cut(target, 120, 30, 50)]) == [200]
    assert target.value == source.value


@claim("put-exists", "put of an existing key returns 0 and keeps the old bytes and size")
def test_put_exists(world: Any) -> None:
    key = world.key()
    assert put(world.a, key, b"old" * 10) == 0
    assert put(world.b, key, b"new" * 10) == 0
    assert put(world.a, key, b"longer" * 10) == 0
    assert get(world.b, key, 30) == (30, b"old" * 10)


@claim("put-in-write", "put of a key that another client is writing returns 0 and stores nothing")
def test_put_in_write(world: Any) -> None:
    key = world.key()
    assert world.a.batch_put_session_start([key], [10]) == [0]
    assert put(world.b, key, b"0123456789") == 0
    assert world.b.is_exist(key) == 0
    assert get(world.b, key, 10)[0] == -703
    assert world.b.get_size(key) == -703
    assert world.b.remove(key) == -703
    assert world.a.batch_put_session_revoke([key]) == [0]


@claim("get-duplicate", "a key named twice in one get: success for both, only the last destination filled")
def test_get_duplicate(world: Any) -> None:
    key, first, last = world.key(), Memory(10), Memory(10)
    assert put(world.a, key, b"0123456789") == 0
    codes = world.b.batch_get_into_multi_buffers([key, key], [[first.address], [last.address]], [[10], [10]])
    assert codes == [10, 10]
    assert (first.value, last.value) == (poison(10), b"0123456789")


@claim("put-duplicate", "a key named twice in one put: 0 for both, the first wins")
def test_put_duplicate(world: Any) -> None:
    key, first, last = world.key(), holding(b"first"), holding(b"other")
    codes = world.a.batch_put_from_multi_buffers([key, key], [[first.address], [last.address]], [[5], [5]])
    assert codes == [0, 0]
    assert get(world.b, key, 5) == (5, b"first")


@claim("get-larger", "a get of more bytes than the object has: -800 with many buffers, nothing written")
def test_get_larger(world: Any) -> None:
    key = world.key()
    assert put(world.a, key, b"0123456789") == 0
    assert get(world.b, key, 11) == (-800, poison(11))


@claim("get-larger-single", "a get into one larger buffer: the object's size, the rest untouched")
def test_get_larger_single(world: Any) -> None:
    key, target = world.key(), Memory(12)
    assert put(world.a, key, b"0123456789") == 0
    assert world.b.batch_get_into([key], [target.address], [12]) == [10]
    assert target.value == b"0123456789" + poison(2)


@claim("get-smaller", "a get of fewer bytes than the object has: -600, nothing written")
def test_get_smaller(world: Any) -> None:
    key, target = world.key(), Memory(9)
    assert put(world.a, key, b"0123456789") == 0
    assert get(world.b, key, 9) == (-600, poison(9))
    assert world.b.batch_get_into([key], [target.address], [9]) == [-600]


@claim("missing", "a missing key: get -704, size -704, remove -704, exist 0, get() empty")
def test_missing(world: Any) -> None:
    key = world.key()
    assert get(world.a, key, 4) == (-704, poison(4))
    assert (world.a.get_size(key), world.a.remove(key), world.a.is_exist(key)) == (-704, -704, 0)
    assert world.a.get(key) == b""
    assert world.a.batch_is_exist([key, key]) == [0, 0]


@claim("empty-batch", "empty batches answer with empty lists")
def test_empty_batch(world: Any) -> None:
    assert world.a.batch_put_from_multi_buffers([], [], []) == []
    assert world.a.batch_get_into_multi_buffers([], [], []) == []
    assert world.a.batch_is_exist([]) == []
    assert world.a.batch_remove([]) == []


@claim("empty-key", "the empty key: put -600, exist 0, get -704")
def test_empty_key(world: Any) -> None:
    assert put(world.a, "", b"x") == -600
    assert world.a.is_exist("") == 0
    assert get(world.a, "", 1)[0] == -704


@claim("odd-keys", "long and odd keys are fine and distinct")
def test_odd_keys(world: Any) -> None:
    base = world.key()
    keys = [base + end for end in ("/", " ", "\n", "@", ":", "..", "%", "ü", "x" * 5000)]
    for i, key in enumerate(keys):
        assert put(world.a, key, bytes([i]) * 8) == 0
    for i, key in enumerate(keys):
        assert get(world.b, key, 8) == (8, bytes([i]) * 8)


@claim("no-bytes", "a put without buffers or bytes: -600")
def test_no_bytes(world: Any) -> None:
    memory = Memory(4)
    assert world.a.batch_put_from_multi_buffers([world.key()], [[]], [[]]) == [-600]
    assert world.a.batch_put_from_multi_buffers([world.key()], [[memory.address]], [[0]]) == [-600]
    assert world.a.put(world.key(), b"") == -600


@claim("zero-length-buffer", "a buffer of length zero among others is skipped")
def test_zero_length_buffer(world: Any) -> None:
    key, source, target = world.key(), holding(b"abcdef"), Memory(6)
    assert world.a.batch_put_from_multi_buffers([key], *[[p] for p in cut(source, 2, 0, 4)]) == [0]
    assert world.b.batch_get_into_multi_buffers([key], *[[p] for p in cut(target, 0, 6)]) == [6]
    assert target.value == b"abcdef"


@claim("outer-mismatch", "lists of unequal lengths: -600 for every key")
def test_outer_mismatch(world: Any) -> None:
    memory = Memory(4)
    keys = [world.key(), world.key()]
    assert world.a.batch_put_from_multi_buffers(keys, [[memory.address]], [[4]]) == [-600, -600]
    assert world.a.batch_get_into_multi_buffers(keys, [[memory.address]], [[4]]) == [-600, -600]


@claim("inner-mismatch", "a put with unequal inner lists: -600 for all keys, nothing stored")
def test_inner_mismatch(world: Any) -> None:
    memory = Memory(4)
    keys = [world.key(), world.key()]
    addresses, sizes = [[memory.address], [memory.address, memory.address]], [[4], [4]]
    assert world.a.batch_put_from_multi_buffers(keys, addresses, sizes) == [-600, -600]
    assert world.a.batch_is_exist(keys) == [0, 0]


@claim("partial-batch", "a batch is answered key by key")
def test_partial_batch(world: Any) -> None:
    there, memory = world.key(), holding(b"0123456789")
    assert put(world.a, there, b"x") == 0
    keys = [world.key(), there, ""]
    rows = [[memory.address]] * 3
    assert world.a.batch_put_from_multi_buffers(keys, rows, [[10]] * 3) == [0, 0, -600]
    assert world.b.batch_is_exist(keys) == [1, 1, 0]


@claim("negative-size", "a negative size raises TypeError")
def test_negative_size(world: Any) -> None:
    memory = Memory(4)
    with pytest.raises(TypeError):
        world.a.batch_put_from_multi_buffers([world.key()], [[memory.address]], [[-1]])


@claim("register", "register: 0; again, overlapping, empty or null -600; unregister: exact start only")
def test_register(world: Any) -> None:
    memory = Memory(8192)
    assert world.a.register_buffer(memory.address, 8192) == 0
    assert world.a.register_buffer(memory.address, 8192) == -600
    assert world.a.register_buffer(memory.address + 16, 100) == -600
    assert world.a.register_buffer(0, 100) == -600
    assert world.a.unregister_buffer(memory.address + 16) == -600
    assert world.a.unregister_buffer(memory.address) == 0
    assert world.a.unregister_buffer(memory.address) == -600


@claim("unregistered-tcp", "over TCP, unregistered memory works")
def test_unregistered_tcp(world: Any) -> None:
    key = world.key()
    assert put(world.a, key, b"bytes") == 0
    assert get(world.b, key, 5) == (5, b"bytes")


@claim("lease-exist", "exist grants a lease: remove -706 until it ends")
def test_lease_exist(world: Any) -> None:
    key = world.key()
    assert put(world.a, key, b"x") == 0
    assert world.b.is_exist(key) == 1
    assert world.a.remove(key) == -706
    world.advance(LEASE_S * 1.3)
    assert world.a.remove(key) == 0


@claim("lease-get", "get and get_size grant leases")
def test_lease_get(world: Any) -> None:
    for use in (lambda key: get(world.b, key, 1), lambda key: world.b.get_size(key)):
        key = world.key()
        assert put(world.a, key, b"x") == 0
        use(key)
        assert world.a.remove(key) == -706


@claim("lease-failing-get", "a failing get grants a lease too")
def test_lease_failing_get(world: Any) -> None:
    key = world.key()
    assert put(world.a, key, b"x") == 0
    assert get(world.b, key, 2)[0] == -800
    assert world.a.remove(key) == -706


@claim("lease-put", "put and put again grant no lease")
def test_lease_put(world: Any) -> None:
    key = world.key()
    assert put(world.a, key, b"x") == 0
    assert put(world.b, key, b"x") == 0
    assert world.b.remove(key) == 0


@claim("lease-extended", "each query extends the lease")
def test_lease_extended(world: Any) -> None:
    key = world.key()
    assert put(world.a, key, b"x") == 0
    assert world.b.is_exist(key) == 1
    world.advance(LEASE_S * 0.7)
    assert world.b.is_exist(key) == 1
    world.advance(LEASE_S * 0.6)
    assert world.a.remove(key) == -706


@claim("remove-force", "remove with force ignores leases; any client may remove")
def test_remove_force(world: Any) -> None:
    key = world.key()
    assert put(world.a, key, b"x") == 0
    assert world.a.is_exist(key) == 1
    assert world.b.remove(key, True) == 0
    assert world.a.is_exist(key) == 0


@claim("remove-batch", "batch_remove answers key by key; a key named twice: 0, then -704")
def test_remove_batch(world: Any) -> None:
    key, missing = world.key(), world.key()
    assert put(world.a, key, b"x") == 0
    assert world.a.batch_remove([key, key, missing]) == [0, -704, -704]


@claim("remove-regex", "remove_by_regex searches; a bad pattern gives -600")
def test_remove_regex(world: Any) -> None:
    stem = world.key().replace("-", "z")
    for end in ("one", "two"):
        assert put(world.a, f"x{stem}{end}", b"x") == 0
    assert world.a.remove_by_regex(stem) == 2
    assert world.a.remove_by_regex("(") == -600


@claim("upsert", "upsert replaces an object, leased or not, with another size")
def test_upsert(world: Any) -> None:
    key, longer = world.key(), holding(b"longer")
    assert put(world.a, key, b"old") == 0
    assert world.b.is_exist(key) == 1
    assert world.a.upsert_from(key, longer.address, 6) == 0
    assert get(world.b, key, 6) == (6, b"longer")


@claim("put-bytes", "put(bytes) and get() round-trip")
def test_put_bytes(world: Any) -> None:
    key = world.key()
    assert world.a.put(key, b"value") == 0
    assert world.b.get(key) == b"value"
    assert world.b.get_size(key) == 5


@claim("session", "a put session: invisible until its end, then all of it; ranges in any order")
def test_session(world: Any) -> None:
    key, source, target = world.key(), holding(b"0123456789"), Memory(10)
    assert world.a.batch_put_session_start([key], [10]) == [0]
    for offset, size in ((6, 4), (0, 6)):
        rows = [[source.address + offset]], [[size]], [[offset]]
        assert world.a.batch_put_from_multi_buffer_ranges([key], *rows) == [size]
        assert world.b.is_exist(key) == 0
    assert world.a.batch_put_session_end([key]) == [0]
    assert get(world.b, key, 10) == (10, b"0123456789")
    assert world.b.batch_get_session_start([key]) == [0]
    for offset, size in ((3, 7), (0, 3)):
        rows = [[target.address + offset]], [[size]], [[offset]]
        assert world.b.batch_get_into_multi_buffer_ranges([key], *rows) == [size]
    assert world.b.batch_get_session_end([key]) == 0
    assert target.value == b"0123456789"


@claim("session-start", "session start: -705 for what exists or is being written, -600 for size 0 and the empty key")
def test_session_start(world: Any) -> None:
    key, open_key = world.key(), world.key()
    assert put(world.a, key, b"x") == 0
    assert world.b.batch_put_session_start([key], [1]) == [-705]
    assert world.a.batch_put_session_start([open_key], [1]) == [0]
    assert world.b.batch_put_session_start([open_key], [1]) == [-705]
    assert world.a.batch_put_session_start([open_key], [1]) == [-600]
    assert world.a.batch_put_session_start([world.key(), ""], [0, 1]) == [-600, -600]
    assert world.a.batch_put_session_revoke([open_key]) == [0]


@claim("session-duplicate", "a key named twice in one session start: 0, then -705")
def test_session_duplicate(world: Any) -> None:
    key = world.key()
    assert world.a.batch_put_session_start([key, key], [1, 1]) == [0, -705]
    assert world.a.batch_put_session_revoke([key]) == [0]


@claim("session-incomplete", "a session's end does not check that anything was written")
def test_session_incomplete(world: Any) -> None:
    key = world.key()
    assert world.a.batch_put_session_start([key], [10]) == [0]
    assert world.a.batch_put_session_end([key]) == [0]
    assert get(world.b, key, 10)[0] == 10


@claim("session-revoke", "revoke frees key and space; the key can be put at once")
def test_session_revoke(world: Any) -> None:
    key = world.key()
    assert world.a.batch_put_session_start([key], [10]) == [0]
    assert world.a.batch_put_session_revoke([key]) == [0]
    assert world.b.is_exist(key) == 0
    assert put(world.b, key, b"0123456789") == 0
    assert get(world.a, key, 10) == (10, b"0123456789")


@claim("session-foreign", "another client's session: range, end and revoke give -600")
def test_session_foreign(world: Any) -> None:
    key, source = world.key(), holding(b"0123456789")
    assert world.a.batch_put_session_start([key], [10]) == [0]
    rows = [[source.address]], [[10]], [[0]]
    assert world.b.batch_put_from_multi_buffer_ranges([key], *rows) == [-600]
    assert world.b.batch_put_session_end([key]) == [-600]
    assert world.b.batch_put_session_revoke([key]) == [-600]
    assert world.a.batch_put_session_revoke([key]) == [0]


@claim("range-bounds", "a range past the object's end, or without a session: -600")
def test_range_bounds(world: Any) -> None:
    key, source = world.key(), holding(b"0123456789")
    rows = [[source.address]], [[10]], [[1]]
    assert world.a.batch_put_from_multi_buffer_ranges([key], *rows) == [-600]
    assert world.a.batch_put_session_start([key], [10]) == [0]
    assert world.a.batch_put_from_multi_buffer_ranges([key], *rows) == [-600]
    assert world.a.batch_put_session_revoke([key]) == [0]


@claim("session-twice", "end and revoke twice, or of what was never open: -600")
def test_session_twice(world: Any) -> None:
    key = world.key()
    assert world.a.batch_put_session_end([key]) == [-600]
    assert world.a.batch_put_session_revoke([key]) == [-600]
    assert world.a.batch_put_session_start([key], [1]) == [0]
    assert world.a.batch_put_session_end([key]) == [0]
    assert world.a.batch_put_session_end([key]) == [-600]


@claim("revoke-refused", "an upsert completes an open session's object: its revoke gives -700, ranges -600, its end 0")
def test_revoke_refused(world: Any) -> None:
    key, source = world.key(), holding(b"x")
    rows = [[source.address]], [[1]], [[0]]
    assert world.a.batch_put_session_start([key], [1]) == [0]
    assert world.a.upsert_from(key, source.address, 1) == 0
    assert world.a.batch_put_from_multi_buffer_ranges([key], *rows) == [1]
    assert world.a.batch_put_session_revoke([key]) == [-700]
    assert world.a.batch_put_from_multi_buffer_ranges([key], *rows) == [-600]
    assert world.a.batch_put_session_revoke([key]) == [-700]
    assert world.a.batch_put_session_end([key]) == [0]
    assert world.a.batch_put_session_end([key]) == [-600]


@claim("get-session-lease", "a get session's range: -707 once after the lease, then -600")
def test_get_session_lease(world: Any) -> None:
    key, target = world.key(), Memory(4)
    assert put(world.a, key, b"0123") == 0
    assert world.b.batch_get_session_start([key, world.key()]) == [0, -704]
    world.advance(LEASE_S * 1.3)
    rows = [[target.address]], [[4]], [[0]]
    assert world.b.batch_get_into_multi_buffer_ranges([key], *rows) == [-707]
    assert world.b.batch_get_into_multi_buffer_ranges([key], *rows) == [-600]
    assert world.b.batch_get_session_end([key]) == 0


@claim("abandoned", "an abandoned write blocks its key until the discard time-out; the next put is stored")
def test_c8_abandoned(world: Any) -> None:
    key = world.key()
    assert world.a.batch_put_session_start([key], [4]) == [0]
    assert put(world.b, key, b"lost") == 0
    assert world.b.is_exist(key) == 0
    world.advance(DISCARD_S + 1.2)
    assert put(world.b, key, b"kept") == 0
    assert get(world.b, key, 4) == (4, b"kept")
    assert world.a.batch_put_session_end([key]) == [-601]


@claim("many-slices", "over TCP, more than 2,048 buffers in one call to another's memory: -800 for the later keys")
def test_many_slices(fresh_world: World) -> None:
    if fresh_world.name == "mooncake":
        pytest.skip("one side only: the real call may hang for 60 s")
    owner, client = fresh_world.client(SEGMENT_BYTES), fresh_world.client()
    memory = Memory(4096)
    keys = [fresh_world.key() for _ in range(3)]
    rows, sizes = [[memory.address] * 1000] * 3, [[4] * 1000] * 3
    assert client.batch_put_from_multi_buffers(keys, rows, sizes) == [0, 0, -800]
    assert owner.batch_put_from_multi_buffers(keys, rows, sizes) == [0, 0, 0]


@claim("small-segment", "a segment of 1 byte to 16 MiB less one: -600; 0 and 16 MiB are fine")
def test_small_segment(fresh_world: World) -> None:
    client = fresh_world.module.MooncakeDistributedStore()
    for size, code in ((1, -600), (8 * MIB, -600), (16 * MIB - 1, -600), (16 * MIB, 0)):
        found = client.setup("127.0.0.1", "P2PHANDSHAKE", size, 0, "tcp", "", fresh_world.address)
        assert found == code, size
    client.close()
    assert fresh_world.client(0).is_exist("x") == 0


@claim("no-segment", "without memory anywhere: put -200")
def test_no_segment(fresh_world: World) -> None:
    assert put(fresh_world.client(0), "k", b"x") == -200


@claim("too-large", "an object larger than the segment: -200, the others of the batch are stored")
def test_too_large(fresh_world: World) -> None:
    client = fresh_world.client(16 * MIB)
    large = Memory(17 * MIB)
    rows = [[large.address], [large.address]]
    assert client.batch_put_from_multi_buffers(["small", "large"], rows, [[1000], [17 * MIB]]) == [0, -200]


@claim("full", "a full store of leased objects refuses at once with -200, and takes again after the leases")
def test_full(fresh_world: World) -> None:
    client = fresh_world.client(16 * MIB)
    value = bytes(MIB)
    stored = []
    for i in range(20):
        if put(client, f"k{i}", value) == 0:
            stored.append(f"k{i}")
            assert client.is_exist(f"k{i}") == 1
    assert 10 <= len(stored) <= 16
    assert put(client, "late", value) == -200
    fresh_world.advance(LEASE_S + 0.5)
    put(client, "late", value)
    fresh_world.advance(0.2)
    assert put(client, "later", value) == 0


@claim("eviction-order", "eviction takes what was used longest ago; a lease protects")
def test_eviction_order(fresh_world: World) -> None:
    client = fresh_world.client(16 * MIB)
    value = bytes(MIB)
    for i in range(10):
        assert put(client, f"k{i}", value) == 0
        fresh_world.advance(0.02)
    assert client.is_exist("k0") == 1
    for i in range(10, 16):
        put(client, f"k{i}", value)
        fresh_world.advance(0.05)
    fresh_world.advance(0.2)
    present = client.batch_is_exist([f"k{i}" for i in range(10)])
    assert present[0] == 1
    assert present[1] == 0
    assert present[9] == 1


@claim("hard-pin", "hard-pinned objects are never evicted; a store full of them refuses for ever")
def test_hard_pin(fresh_world: World) -> None:
    client = fresh_world.client(16 * MIB)
    config = fresh_world.module.ReplicateConfig()
    config.with_hard_pin = True
    codes = [put(client, f"k{i}", bytes(MIB), config) for i in range(20)]
    assert codes.count(-200) >= 4
    fresh_world.advance(LEASE_S + 0.5)
    assert put(client, "more", bytes(2 * MIB)) == -200
    assert client.remove("k0", True) == 0


@claim("close-drops", "closing the owner of a segment drops its objects")
def test_close_drops(fresh_world: World) -> None:
    owner, other = fresh_world.client(16 * MIB), fresh_world.client(0)
    assert put(owner, "k", b"x") == 0
    assert other.is_exist("k") == 1
    assert owner.close() == 0
    assert owner.close() == 0
    assert other.is_exist("k") == 0


@claim("preferred-segment", "objects go to the preferred segment, and elsewhere when it is full")
def test_preferred_segment(fresh_world: World) -> None:
    first, second = fresh_world.client(16 * MIB), fresh_world.client(16 * MIB)
    config = fresh_world.module.ReplicateConfig()
    config.preferred_segment = second.get_hostname()
    assert [put(first, f"k{i}", bytes(MIB), config) for i in range(8)] == [0] * 8
    second.close()
    assert first.batch_is_exist([f"k{i}" for i in range(8)]) == [0] * 8


@claim("replicas", "more replicas than segments: as many as there are; 0 replicas -600")
def test_replicas(fresh_world: World) -> None:
    first, second = fresh_world.client(16 * MIB), fresh_world.client(16 * MIB)
    config = fresh_world.module.ReplicateConfig()
    config.replica_num = 4
    assert put(first, "k", b"value", config) == 0
    second.close()
    assert get(first, "k", 5) == (5, b"value")
    config.replica_num = 0
    assert put(first, "none", b"value", config) == -600
