"""Stores with one known mistake each, and the test that must catch it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces, Store
from tests.targets.borrowed import Borrowed

OK, MISS = Status.OK, Status.MISS


@dataclass(frozen=True)
class WrongStore:
    """A mistake: `make` wraps a right store."""

    mistake: str
    caught_by: str
    make: Callable[[Store], Store]
    arguments: dict[str, Any]


WRONG_STORES: list[WrongStore] = []


def wrong(mistake: str, caught_by: str, **arguments: Any) -> Callable[[type[Borrowed]], type[Borrowed]]:
    """Enter a class into the table."""

    def enter(cls: type[Borrowed]) -> type[Borrowed]:
        WRONG_STORES.append(WrongStore(mistake, caught_by, cls, arguments))
        return cls

    return enter


def values(addresses: Pieces, sizes: Pieces) -> list[bytes]:
    """What the pieces hold."""
    return [
        b"".join(ctypes.string_at(a, n) for a, n in zip(*one, strict=True))
        for one in zip(addresses, sizes, strict=True)
    ]


def overwrite(addresses: Sequence[int], sizes: Sequence[int], value: bytes) -> None:
    """Set what the pieces hold, as far as the value goes."""
    for address, size in zip(addresses, sizes, strict=True):
        ctypes.memmove(address, value[:size], len(value[:size]))
        value = value[size:]


@wrong("drops the last byte", "test_what_is_put_is_got")
class Truncates(Borrowed):
    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        shorter = [[*s[:-1], s[-1] - 1] if s[-1] > 1 else list(s) for s in sizes]
        return super().put(keys, addresses, shorter)


@wrong("swaps the first two pieces", "test_what_is_put_is_got")
class Swaps(Borrowed):
    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return super().put(keys, [[*a[1::-1], *a[2:]] for a in addresses], [[*s[1::-1], *s[2:]] for s in sizes])


@wrong("flips a bit", "test_what_is_put_is_got")
class FlipsABit(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        statuses = super().get(keys, addresses, sizes)
        for status, a in zip(statuses, addresses, strict=True):
            if status.ok:
                ctypes.memmove(a[0], bytes([ctypes.string_at(a[0], 1)[0] ^ 1]), 1)
        return statuses


@wrong("leaves the first piece of a read out", "test_what_is_put_is_got")
class SkipsAPiece(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        kept = [
            [ctypes.string_at(a, n) for a, n in zip(*one, strict=True)] for one in zip(addresses, sizes, strict=True)
        ]
        statuses = super().get(keys, addresses, sizes)
        for a, before in zip(addresses, kept, strict=True):
            if len(a) > 1:
                ctypes.memmove(a[0], before[0], len(before[0]))
        return statuses


@wrong("returns OK with the destination's old bytes", "test_what_is_put_is_got")
class StaleBytes(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return super().exist(keys)


@wrong("fills what is missing with zeros", "test_missing_objects")
class FillsMisses(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        statuses = super().get(keys, addresses, sizes)
        for status, a, s in zip(statuses, addresses, sizes, strict=True):
            if status is MISS:
                overwrite(a, s, bytes(sum(s)))
        return statuses


@wrong("takes a miss for success", "test_missing_objects")
class MissIsOk(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return [OK if status is MISS else status for status in super().get(keys, addresses, sizes)]


@wrong("raises on a miss", "test_missing_objects")
class RaisesOnMiss(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        statuses = super().get(keys, addresses, sizes)
        if MISS in statuses:
            raise KeyError(keys)
        return statuses


@wrong("says that everything exists", "test_missing_objects")
class EverythingExists(Borrowed):
    def exist(self, keys: Sequence[str]) -> list[Status]:
        return [OK] * len(keys)


@wrong("says that nothing exists", "test_batches_answer_key_by_key")
class NothingExists(Borrowed):
    def exist(self, keys: Sequence[str]) -> list[Status]:
        return [MISS] * len(keys)


@wrong("says OK to a removal it does not do", "test_removed_objects_are_gone")
class NeverRemoves(Borrowed):
    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return super().exist(keys)


@wrong("ignores leases", "test_a_lease_forbids_removal_until_it_ends")
class IgnoresLeases(Borrowed):
    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return super().remove(keys, force=True)


@wrong("keeps leases for ever", "test_a_lease_forbids_removal_until_it_ends")
class EternalLeases(Borrowed):
    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        return super().remove(keys, force=True) if force else [Status.LEASED] * len(keys)


@wrong("serves the old object after removal and another put", "test_removed_objects_are_gone")
class ServesTheOld(Borrowed):
    first: dict[str, bytes]

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.first = {}

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        for name, value in zip(keys, values(addresses, sizes), strict=True):
            self.first.setdefault(name, value)
        return super().put(keys, addresses, sizes)

    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        statuses = super().get(keys, addresses, sizes)
        for status, name, a, s in zip(statuses, keys, addresses, sizes, strict=True):
            if status.ok and name in self.first:
                overwrite(a, s, self.first[name])
        return statuses


@wrong("reads from a copy on the side", "test_a_changed_object_is_not_served_from_elsewhere")
class CopyOnTheSide(ServesTheOld):
    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[Status]:
        for name in keys:
            self.first.pop(name, None)
        return super().remove(keys, force=force)


@wrong("stores nothing and keeps objects to itself", "test_another_client_reads_the_same")
class KeepsToItself(ServesTheOld):
    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        for name, value in zip(keys, values(addresses, sizes), strict=True):
            self.first.setdefault(name, value)
        return [OK] * len(keys)

    def exist(self, keys: Sequence[str]) -> list[Status]:
        return [OK if name in self.first else MISS for name in keys]

    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        for name, a, s in zip(keys, addresses, sizes, strict=True):
            overwrite(a, s, self.first.get(name, b""))
        return self.exist(keys)


@wrong("replaces what exists", "test_a_second_put_changes_nothing")
class Replaces(Borrowed):
    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        super().remove(keys, force=True)
        return super().put(keys, addresses, sizes)


@wrong("loses the last of a batch", "test_the_last_of_a_batch_counts")
class LosesTheLast(Borrowed):
    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        if len(keys) < 2:
            return super().put(keys, addresses, sizes)
        return [*super().put(keys[:-1], addresses[:-1], sizes[:-1]), OK]


@wrong("returns too few results", "test_batches_answer_key_by_key")
class TooFew(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return super().get(keys, addresses, sizes)[:1]


@wrong("returns None", "test_missing_objects")
class ReturnsNone(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        super().get(keys, addresses, sizes)
        return None  # type: ignore[return-value]


@wrong("returns numbers", "test_missing_objects")
class ReturnsNumbers(Borrowed):
    def exist(self, keys: Sequence[str]) -> list[Status]:
        return [int(status.ok) for status in super().exist(keys)]  # type: ignore[misc]


@wrong("answers in the order of sorted keys", "test_batches_answer_key_by_key")
class SortsAnswers(Borrowed):
    def exist(self, keys: Sequence[str]) -> list[Status]:
        return super().exist(sorted(keys, key=lambda name: name[::-1]))


@wrong("puts one key's bytes under another of the batch", "test_the_last_of_a_batch_counts")
class ConfusesKeys(Borrowed):
    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return super().put(keys, addresses[::-1], sizes[::-1])


@wrong("fills only the last of a key named twice", "test_a_key_named_twice_fills_both_destinations")
class OnlyTheLast(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        last = {name: i for i, name in enumerate(keys)}
        order = sorted(last.values())
        found = super().get([keys[i] for i in order], [addresses[i] for i in order], [sizes[i] for i in order])
        status = {keys[i]: answer for i, answer in zip(order, found, strict=True)}
        return [status[name] for name in keys]


@wrong("serves a shorter object as if it were whole", "test_another_size_is_never_ok", asked=200)
class ShortIsOk(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        return [OK if status is not MISS else status for status in super().get(keys, addresses, sizes)]


@wrong("serves the beginning of a longer object", "test_another_size_is_never_ok", asked=99)
class PrefixIsOk(ShortIsOk):
    """The same answer to another question."""


@wrong("refuses many pieces", "test_many_pieces")
class FewPieces(Borrowed):
    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        statuses = super().put(keys, addresses, sizes)
        return [Status.UNAVAILABLE if sum(map(len, sizes)) > 2048 else status for status in statuses]


@wrong("cuts large objects at 1 MiB", "test_a_large_object")
class CutsLarge(Borrowed):
    def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        statuses = super().get(keys, addresses, sizes)
        for a, s in zip(addresses, sizes, strict=True):
            if sum(s) > 1 << 20:
                ctypes.memset(a[-1], 0, s[-1])
        return statuses


def renaming(rename: Callable[[str], str]) -> Callable[[Store], Store]:
    """A store that knows keys by another name."""

    class Renames(Borrowed):
        def exist(self, keys: Sequence[str]) -> list[Status]:
            return super().exist([rename(name) for name in keys])

        def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
            return super().put([rename(name) for name in keys], addresses, sizes)

        def get(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
            return super().get([rename(name) for name in keys], addresses, sizes)

    return Renames


for mistake, rename in {
    "folds the case of keys": str.lower,
    "strips keys": str.strip,
    "drops a slash at a key's end": lambda name: name.rstrip("/"),
    "drops tags": lambda name: name.split("+")[0],
    "decodes keys": lambda name: name.replace("%2F", "/"),
}.items():
    WRONG_STORES.append(WrongStore(mistake, "test_keys_are_told_apart", renaming(rename), {}))


@wrong("cuts small values", "test_small_values")
class CutsValues(Borrowed):
    def read(self, key: str) -> tuple[Status, bytes]:
        status, value = super().read(key)
        return status, value[:-1]


@wrong("replaces small values", "test_small_values")
class ReplacesValues(Borrowed):
    def write(self, key: str, value: bytes, *, pinned: bool = False) -> Status:
        super().remove([key], force=True)
        return super().write(key, value, pinned=pinned)


@wrong("answers an empty batch with one status", "test_empty_batches")
class EmptyIsOne(Borrowed):
    def exist(self, keys: Sequence[str]) -> list[Status]:
        return super().exist(keys) or [MISS]
