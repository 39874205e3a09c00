"""What every store must do: exact bytes or an honest miss."""

from __future__ import annotations

import ctypes
import itertools
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvpool_conformance.asking import UnansweredError, ask, opened
from kvpool_conformance.backend import StoreBackend
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Store

POISON = 0xA5
_STILL_IN_USE: list[Memory] = []
"""Memory of calls that never returned: they may write into it as long as the process lives."""


class Memory:
    """Registered host memory of a test, cut into pieces."""

    def __init__(self, store: Store, num_bytes: int) -> None:
        self._buffer = ctypes.create_string_buffer(bytes([POISON]) * num_bytes, num_bytes)
        self._store = store
        self.address = ctypes.addressof(self._buffer)
        status = store.register(self.address, num_bytes)
        assert status is Status.OK, f"registering {num_bytes} bytes: {status}"

    def write(self, offset: int, value: bytes) -> None:
        """Set bytes."""
        ctypes.memmove(self.address + offset, value, len(value))

    def read(self, offset: int = 0, num_bytes: int | None = None) -> bytes:
        """A copy of bytes."""
        return self._buffer.raw[offset : None if num_bytes is None else offset + num_bytes]

    def close(self) -> None:
        """Unregister."""
        self._store.unregister(self.address)


@contextmanager
def memory(store: Store, num_bytes: int) -> Iterator[Memory]:
    """Registered memory for a while, all `POISON`."""
    made = Memory(store, num_bytes)
    try:
        yield made
    except UnansweredError:
        _STILL_IN_USE.append(made)
        raise
    finally:
        if made not in _STILL_IN_USE:
            made.close()


def key(name: str = "object") -> str:
    """A key that nobody has used: suites may share one store."""
    return f"conformance/{name}/{uuid.uuid4().hex}"


def put(store: Store, name: str, value: bytes, cuts: Sequence[int] = ()) -> Status:
    """Put a value, cut into pieces at `cuts`."""
    with memory(store, len(value)) as source:
        source.write(0, value)
        addresses, sizes = pieces(source.address, len(value), cuts)
        (status,) = store.put([name], [addresses], [sizes])
        return status


def get(store: Store, name: str, num_bytes: int, cuts: Sequence[int] = ()) -> tuple[Status, bytes]:
    """Get into fresh memory; the status and what the memory holds afterwards."""
    with memory(store, num_bytes) as target:
        addresses, sizes = pieces(target.address, num_bytes, cuts)
        (status,) = store.get([name], [addresses], [sizes])
        return status, target.read()


def pieces(address: int, num_bytes: int, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Addresses and sizes of `num_bytes` bytes cut at offsets."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < num_bytes}), num_bytes]
    return [address + start for start in edges[:-1]], [b - a for a, b in itertools.pairwise(edges)]


@pytest.mark.kvpool_capability("objects")
class StoreConformance:
    """Subclass, and give a fixture `backend` that returns a `StoreBackend`."""

    def test_what_is_put_is_got(self, backend: StoreBackend) -> None:
        """Any bytes, cut one way on the way in and another way on the way out."""

        @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @example([b"one", b"another", b"last"], [5])
        @given(st.lists(st.binary(min_size=1, max_size=500), min_size=1, max_size=7), st.lists(st.integers(1, 3499)))
        def check(cut_in: list[bytes], cuts_out: list[int]) -> None:
            name, value = key(), b"".join(cut_in)
            assert put(store, name, value, list(itertools.accumulate(map(len, cut_in)))).stored
            # Taken round the end: a place behind the value would cut nothing.
            assert get(store, name, len(value), [cut % len(value) for cut in cuts_out]) == (Status.OK, value)

        with opened(backend) as store:
            check()

    def test_another_client_reads_the_same(self, backend: StoreBackend) -> None:
        """A store is shared."""
        with opened(backend) as writer, opened(backend) as reader:
            name = key()
            assert put(writer, name, b"shared" * 100).stored
            assert reader.exist([name]) == [Status.OK]
            assert get(reader, name, 600) == (Status.OK, b"shared" * 100)

    @pytest.mark.kvpool_capability("looking round the store")
    def test_what_is_stored_is_what_was_put(self, backend: StoreBackend) -> None:
        """Looked at round the interface."""
        with opened(backend) as store:
            name = key()
            assert put(store, name, bytes(range(256)), [10, 100]).stored
            try:
                found = ask(backend, "peek", name)
            except NotImplementedError:
                pytest.skip("not offered: peek")
            assert found == bytes(range(256))

    @pytest.mark.kvpool_capability("looking round the store")
    def test_a_changed_object_is_not_served_from_elsewhere(self, backend: StoreBackend) -> None:
        """Reads come from the store, not from a copy on the side."""
        with opened(backend) as store:
            name = key()
            assert put(store, name, b"a" * 100).stored
            try:
                ask(backend, "poke", name, 50, b"X")
            except NotImplementedError:
                pytest.skip("not offered: poke")
            assert get(store, name, 100) == (Status.OK, b"a" * 50 + b"X" + b"a" * 49)

    def test_missing_objects(self, backend: StoreBackend) -> None:
        """A miss is a miss, and touches nothing."""
        with opened(backend) as store:
            name = key()
            assert store.exist([name]) == [Status.MISS]
            status, found = get(store, name, 64)
            assert status is Status.MISS
            assert found == bytes([POISON]) * 64
            assert store.remove([name]) == [Status.MISS]

    def test_a_second_put_changes_nothing(self, backend: StoreBackend) -> None:
        """Objects are written once; the second writer learns that the key is taken, or is told OK."""
        with opened(backend) as store:
            name = key()
            assert put(store, name, b"first" * 10) is Status.OK
            assert put(store, name, b"other" * 10).stored
            assert get(store, name, 50) == (Status.OK, b"first" * 10)
            assert put(store, name, b"longer" * 20).stored
            assert get(store, name, 50) == (Status.OK, b"first" * 10)

    @pytest.mark.parametrize("asked", [1, 99, 101, 200])
    def test_another_size_is_never_ok(self, backend: StoreBackend, asked: int) -> None:
        """Whoever asks for more or fewer bytes than the object has gets no OK."""
        with opened(backend) as store:
            name = key()
            assert put(store, name, b"x" * 100).stored
            status, _ = get(store, name, asked)
            assert status is not Status.OK

    @pytest.mark.kvpool_capability("batches")
    def test_batches_answer_key_by_key(self, backend: StoreBackend) -> None:
        """A mixture of there and not there: each key has its own answer, each destination its own bytes."""
        with opened(backend) as store:
            names = [key(str(i)) for i in range(12)]
            there = [i for i in range(12) if i % 3]
            for i in there:
                assert put(store, names[i], bytes([i]) * 64).stored
            assert store.exist(names) == [Status.OK if i % 3 else Status.MISS for i in range(12)]
            with memory(store, 12 * 64) as target:
                addresses = [[target.address + 64 * i, target.address + 64 * i + 20] for i in range(12)]
                statuses = store.get(names, addresses, [[20, 44]] * 12)
                assert statuses == [Status.OK if i % 3 else Status.MISS for i in range(12)]
                for i in range(12):
                    assert target.read(64 * i, 64) == bytes([i if i % 3 else POISON]) * 64, i

    @pytest.mark.kvpool_capability("batches")
    def test_the_last_of_a_batch_counts(self, backend: StoreBackend) -> None:
        """Nothing of a long batch is lost."""
        with opened(backend) as store, memory(store, 200 * 8) as source:
            source.write(0, b"".join(i.to_bytes(8, "big") for i in range(200)))
            names = [key(str(i)) for i in range(200)]
            addresses = [[source.address + 8 * i] for i in range(200)]
            assert all(s.stored for s in store.put(names, addresses, [[8]] * 200))
            assert store.exist(names) == [Status.OK] * 200
            for i in (0, 99, 198, 199):
                assert get(store, names[i], 8) == (Status.OK, i.to_bytes(8, "big"))

    @pytest.mark.kvpool_capability("batches")
    def test_a_key_named_twice_fills_both_destinations(self, backend: StoreBackend) -> None:
        """OK for both means bytes in both."""
        with opened(backend) as store:
            name = key()
            assert put(store, name, b"twice" * 10).stored
            with memory(store, 100) as target:
                statuses = store.get([name, name], [[target.address], [target.address + 50]], [[50], [50]])
                for i, status in enumerate(statuses):
                    if status is Status.OK:
                        assert target.read(50 * i, 50) == b"twice" * 10, f"destination {i} was not filled"

    @pytest.mark.kvpool_capability("batches")
    def test_empty_batches(self, backend: StoreBackend) -> None:
        """Nothing asked, nothing answered."""
        with opened(backend) as store:
            assert store.exist([]) == store.put([], [], []) == store.get([], [], []) == store.remove([]) == []

    @pytest.mark.kvpool_capability("many pieces")
    def test_many_pieces(self, backend: StoreBackend) -> None:
        """More pieces than a transport takes in one call (2,928 of 16 sparse blocks hang Mooncake's over TCP)."""
        with opened(backend) as store, memory(store, 2 * 16 * 183 * 4) as whole:
            half = 16 * 183 * 4
            value = b"".join(i.to_bytes(4, "big") for i in range(16 * 183))
            whole.write(0, value)
            names = [key(str(i)) for i in range(16)]
            rows = [[4 * (183 * block + piece) for piece in range(183)] for block in range(16)]
            sizes = [[4] * 183] * 16
            source = [[whole.address + offset for offset in row] for row in rows]
            target = [[whole.address + half + offset for offset in row] for row in rows]
            assert all(status.stored for status in store.put(names, source, sizes))
            assert store.get(names, target, sizes) == [Status.OK] * 16
            assert whole.read(half) == value

    @pytest.mark.kvpool_capability("large objects")
    def test_a_large_object(self, backend: StoreBackend) -> None:
        """A block of a sparse model at full size, 183 pieces of three sizes."""
        with opened(backend) as store:
            sizes = [131_072, 16_384, 32_768] * 61
            cuts = [sum(sizes[:i]) for i in range(1, len(sizes))]
            value = (bytes(range(251)) * (sum(sizes) // 251 + 1))[: sum(sizes)]
            name = key()
            assert put(store, name, value, cuts).stored
            status, found = get(store, name, len(value), cuts)
            assert status is Status.OK
            # Compared beforehand: a difference of 11 MB takes minutes to print.
            equal = found == value
            assert equal, "the bytes differ"

    @pytest.mark.kvpool_capability("removal")
    def test_removed_objects_are_gone(self, backend: StoreBackend) -> None:
        """And the key is free for another object."""
        with opened(backend) as store:
            name = key()
            assert put(store, name, b"old" * 10).stored
            assert store.remove([name], force=True) == [Status.OK]
            assert store.exist([name]) == [Status.MISS]
            assert get(store, name, 30)[0] is Status.MISS
            assert put(store, name, b"new!" * 10).stored
            assert get(store, name, 40) == (Status.OK, b"new!" * 10)

    @pytest.mark.kvpool_capability("leases")
    def test_a_lease_forbids_removal_until_it_ends(self, backend: StoreBackend) -> None:
        """Somebody may be reading."""
        if not backend.lease_s:
            pytest.skip("not offered: leases")
        with opened(backend) as store, opened(backend) as other:
            name = key()
            assert put(store, name, b"leased").stored
            assert other.exist([name]) == [Status.OK]
            assert store.remove([name]) == [Status.LEASED]
            assert get(other, name, 6) == (Status.OK, b"leased")
            ask(backend, "advance", backend.lease_s * 1.2)
            assert store.remove([name]) == [Status.OK]

    @pytest.mark.kvpool_capability("small values")
    def test_small_values(self, backend: StoreBackend) -> None:
        """Written once, read whole."""
        with opened(backend) as store:
            name = key()
            assert store.read(name) == (Status.MISS, b"")
            assert store.write(name, b"descriptor").stored
            assert store.write(name, b"another").stored
            assert store.read(name) == (Status.OK, b"descriptor")

    @pytest.mark.kvpool_capability("keys")
    def test_keys_are_told_apart(self, backend: StoreBackend) -> None:
        """Near keys are different objects."""
        with opened(backend) as store:
            base = key()
            names = [base, base + "/", base + " ", base.upper(), base + "+0123456789abcdef", base + "%2F"]
            for i, name in enumerate(names):
                assert put(store, name, bytes([i]) * 16).stored
            for i, name in enumerate(names):
                assert get(store, name, 16) == (Status.OK, bytes([i]) * 16)
