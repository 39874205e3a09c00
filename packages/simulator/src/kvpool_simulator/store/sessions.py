"""Objects in parts: put sessions and get sessions, and reads of ranges without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool_simulator.store import codes
from kvpool_simulator.store.arguments import Pieces, deeper, integers, nested, sequence, texts
from kvpool_simulator.store.calls import call
from kvpool_simulator.store.memory import Access, gather, scatter
from kvpool_simulator.store.objects import Lookup
from kvpool_simulator.store.options import ReplicateConfig
from kvpool_simulator.store.segment import Replica
from kvpool_simulator.store.transfers import DEFAULT_CONFIG, Slices, Transfers, checked

Range = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Addresses, sizes and offsets of one object's pieces."""


@dataclass
class OpenPut:
    """An object that this client writes in parts."""

    replicas: tuple[Replica, ...]
    refused: bool = False
    """The master has refused its end or revoke: it takes no more bytes until one of them is accepted."""


class Sessions(Transfers):
    """Put and get sessions. They live in the client; the master knows puts alone, as unfinished writes."""

    @call(lambda *_, **__: [])
    def batch_put_session_start(
        self, keys: list[str], sizes: Sequence[int], config: ReplicateConfig = DEFAULT_CONFIG
    ) -> list[int]:
        """Reserve objects: 0, -705 for one that exists or is being written, or a code."""
        names, lengths = texts(keys), integers(sizes)
        if len(names) != len(lengths):
            return [codes.INVALID_PARAMS] * len(names)
        fresh = [i for i, name in enumerate(names) if name not in self._open_puts]
        results = [codes.INVALID_PARAMS] * len(names)
        arguments = [names[i] for i in fresh], [lengths[i] for i in fresh], self._client, checked(config)
        started = self._ask("put_start", *arguments)
        for at, i in enumerate(fresh):
            results[i], replicas = (started, ()) if isinstance(started, int) else started[at]
            if results[i] == codes.OK:
                self._open_puts[names[i]] = OpenPut(replicas)
        return results

    @call(lambda *_, **__: [])
    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], all_buffer_ptrs: Pieces, all_sizes: Pieces, all_dst_offsets: Pieces
    ) -> list[int]:
        """Write parts of open objects, in any order: bytes written or a code for each key."""
        slices = Slices(self._limited)

        def write(key: str, parts: Range) -> int:
            opened = self._open_puts.get(key)
            if opened is None or opened.refused:
                return codes.INVALID_PARAMS
            if not parts[1]:
                return codes.INVALID_REPLICA
            return self._move(opened.replicas, opened.replicas[0].num_bytes, parts, slices, put=True)

        return self._each(keys, all_buffer_ptrs, all_sizes, all_dst_offsets, write)

    @call(lambda *_, **__: [])
    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        """Make objects visible, whole or not: that is the caller's to know."""
        return self._finish(texts(keys), "put_end", {codes.OK})

    @call(lambda *_, **__: [])
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        """Give objects up; also one that the store has lost meanwhile."""
        return self._finish(texts(keys), "put_revoke", {codes.OK, codes.OBJECT_NOT_FOUND})

    @call(lambda *_, **__: [])
    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        """Open objects for reading; each holds its lease from here. Again: the lease anew."""
        names = texts(keys)
        found = self._query(names)
        for name, one in zip(names, found, strict=True):
            if one.code == codes.OK:
                self._open_gets[name] = one
            else:
                self._open_gets.pop(name, None)
        return [one.code for one in found]

    @call(lambda *_, **__: [])
    def batch_get_into_multi_buffer_ranges(
        self, keys: list[str], all_buffer_ptrs: Pieces, all_sizes: Pieces, all_src_offsets: Pieces
    ) -> list[int]:
        """Read parts of open objects: bytes read or a code for each key; -707 once the lease has run out."""
        now, slices = self._now(), Slices(self._limited)

        def read(key: str, parts: Range) -> int:
            found = self._open_gets.get(key)
            if found is None:
                return codes.INVALID_PARAMS
            if now >= found.lease_end:
                self._open_gets.pop(key, None)
                return codes.LEASE_EXPIRED
            return self._move(found.replicas[:1], found.num_bytes, parts, slices, put=False)

        return self._each(keys, all_buffer_ptrs, all_sizes, all_src_offsets, read)

    @call(lambda *_, **__: codes.SETUP_FAIL)
    def batch_get_session_end(self, keys: list[str]) -> int:
        """0, also for what was not open."""
        for key in texts(keys):
            self._open_gets.pop(key, None)
        return codes.OK

    @call()
    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[list[str]],
        all_dst_offsets: Sequence[Pieces],
        all_src_offsets: Sequence[Pieces],
        all_sizes: Sequence[Pieces],
    ) -> list[list[list[int]]]:
        """Read parts without a session: bytes or a code by buffer, key and part.

        The only call that insists on registered memory in every profile.
        """
        pointers, keys = integers(buffer_ptrs), [texts(names) for names in sequence(all_keys)]
        targets, sources, sizes = deeper(all_dst_offsets), deeper(all_src_offsets), deeper(all_sizes)
        if not len(pointers) == len(keys) == len(targets) == len(sources) == len(sizes):
            return [[[codes.INVALID_PARAMS]]] * max(len(pointers), len(keys))
        return [self._ranges_of(*one) for one in zip(pointers, keys, targets, sources, sizes, strict=True)]

    # Inside

    def _each(
        self, keys: list[str], addresses: Pieces, sizes: Pieces, offsets: Pieces, act: Callable[[str, Range], int]
    ) -> list[int]:
        names, parts = texts(keys), (nested(addresses), nested(sizes), nested(offsets))
        if any(len(one) != len(names) for one in parts):
            return [codes.INVALID_PARAMS] * len(names)
        results = [act(name, one) for name, one in zip(names, zip(*parts, strict=True), strict=True)]
        self._pass_transfer_time()
        return results

    def _move(self, replicas: Sequence[Replica], num_bytes: int, parts: Range, slices: Slices, *, put: bool) -> int:
        """Copy parts to every replica, or from the first; never by a mere local copy, so nothing crashes."""
        addresses, sizes, offsets = parts
        if not len(addresses) == len(sizes) == len(offsets):
            return codes.INVALID_PARAMS
        if any(offset + size > num_bytes for offset, size in zip(offsets, sizes, strict=True)):
            return codes.INVALID_PARAMS
        if any(not address and size for address, size in zip(addresses, sizes, strict=True)):
            return codes.INVALID_PARAMS
        reach = self._memory.reach(addresses, sizes)
        if slices.too_many(len(sizes)) or reach.access is not Access.OK:
            return codes.TRANSFER_FAIL
        copy = gather if put else scatter
        for replica in replicas:
            memory = self._memory_of(replica)
            if memory is None:
                return codes.TRANSFER_FAIL
            for address, size, offset in zip(addresses, sizes, offsets, strict=True):
                copy(memory, replica.offset + offset, [address], [size], reach.region)
        return sum(sizes)

    def _finish(self, keys: list[str], name: str, over: set[int]) -> list[int]:
        """End or revoke; a key named twice gets one answer."""
        opened = [key for key in dict.fromkeys(keys) if key in self._open_puts]
        answers: dict[str, int] = {}
        if opened:
            answers = dict(zip(opened, self._ask_each(name, opened, self._client), strict=True))
        for key, code in answers.items():
            if code in over:
                self._open_puts.pop(key, None)
                answers[key] = codes.OK
            elif code in (codes.ILLEGAL_CLIENT, codes.OBJECT_NOT_FOUND, codes.INVALID_WRITE):
                self._open_puts[key].refused = True
        return [answers.get(key, codes.INVALID_PARAMS) for key in keys]

    def _ranges_of(
        self, pointer: int, keys: list[str], targets: Pieces, sources: Pieces, sizes: Pieces
    ) -> list[list[int]]:
        """Parts of several objects into one buffer."""
        if not len(keys) == len(targets) == len(sources) == len(sizes):
            return [[codes.INVALID_PARAMS]] * len(keys)
        found = self._query(keys)
        return [
            [codes.INVALID_PARAMS] * len(one[1])
            if len(set(map(len, one[1:]))) > 1
            else [self._range_of(one[0], pointer + target, *rest) for target, *rest in zip(*one[1:], strict=True)]
            for one in zip(found, targets, sources, sizes, strict=True)
        ]

    def _range_of(self, found: Lookup, address: int, offset: int, size: int) -> int:
        if found.code != codes.OK:
            return found.code
        if not self._memory.registered(address, size):
            return codes.INVALID_PARAMS
        parts: Any = [address], [size], [offset]
        return self._move(found.replicas[:1], found.num_bytes, parts, Slices(False), put=False)
