"""Whole objects, from and to callers' memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_simulator.store import codes
from kvpool_simulator.store.arguments import Pieces, boolean, integer, integers, nested, text, texts
from kvpool_simulator.store.calls import call
from kvpool_simulator.store.codes import WouldCrashError
from kvpool_simulator.store.connection import Connection
from kvpool_simulator.store.memory import Access, Reach, gather, scatter
from kvpool_simulator.store.objects import Lookup
from kvpool_simulator.store.options import ReplicateConfig
from kvpool_simulator.store.segment import Replica

MAX_SLICES = 2048
"""Pieces in flight in one call over TCP; keys beyond fail (or the real call hangs for 60 s)."""
DEFAULT_CONFIG = ReplicateConfig()
ALL_OURS = Reach(Access.OK)
NOT_SENT = Reach(Access.UNREGISTERED)


def checked(config: ReplicateConfig) -> ReplicateConfig:
    """The configuration. Raises `TypeError` for anything else."""
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected this module's ReplicateConfig")
    return config


class Slices:
    """Pieces that one call has in flight."""

    def __init__(self, limited: bool) -> None:
        self._left = MAX_SLICES if limited else None

    def too_many(self, num_pieces: int) -> bool:
        """Count some more."""
        if self._left is None:
            return False
        self._left -= num_pieces
        return self._left < 0


class Transfers(Connection):
    """Puts and gets of whole objects by address."""

    @call(lambda *_, **__: [])
    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: Pieces,
        all_sizes: Pieces,
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """0 or a code for each key. A key that exists, or that another is writing, gives 0 and changes nothing."""
        names, addresses, sizes = texts(keys), nested(all_buffer_ptrs), nested(all_sizes)
        # Only this call knows `prefer_alloc_in_same_node`, and only for one replica.
        if checked(config).prefer_alloc_in_same_node and config.replica_num == 1:
            return self._put_all(names, addresses, sizes, config)
        return self._put_spread(names, addresses, sizes, config)

    @call()
    def batch_put_from(
        self,
        keys: list[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """The same with one piece a key."""
        return self._put_spread(texts(keys), *one_each(buffer_ptrs, sizes), checked(config))

    @call(lambda *_, **__: codes.INVALID_PARAMS)
    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """0 or a code; 0 too for no bytes, which stores nothing."""
        if not integer(size):
            return codes.OK
        return self._put_spread([text(key)], [[integer(buffer_ptr)]], [[size]], checked(config))[0]

    @call(lambda *_, **__: codes.INVALID_PARAMS)
    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = DEFAULT_CONFIG) -> int:
        """Insert or replace, leased or not: 0 or a code; 0 too for no bytes, which changes nothing."""
        if not integer(size):
            return codes.OK
        return self._put_spread([text(key)], [[integer(buffer_ptr)]], [[size]], checked(config), upsert=True)[0]

    @call(lambda keys, *_, **__: [codes.INVALID_PARAMS] * len(keys))
    def batch_upsert_from(
        self,
        keys: list[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> list[int]:
        """The same for several keys; of a key named twice the last value stays."""
        return self._put_spread(texts(keys), *one_each(buffer_ptrs, sizes), checked(config), upsert=True)

    @call()
    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: Pieces, all_sizes: Pieces, prefer_alloc_in_same_node: bool = False
    ) -> list[int]:
        """The object's bytes or a code for each key; sizes must sum up to exactly the object's.

        Of a key named twice only the last destination is filled, though all report success.
        """
        boolean(prefer_alloc_in_same_node)
        return self._get_all(texts(keys), nested(all_buffer_ptrs), nested(all_sizes), exact=True)

    @call()
    def batch_get_into(self, keys: list[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The same with one piece a key; a destination may be larger than the object."""
        return self._get_all(texts(keys), *one_each(buffer_ptrs, sizes), exact=False)

    @call()
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Bytes or a code."""
        return self._get_all([text(key)], [[integer(buffer_ptr)]], [[integer(size)]], exact=False)[0]

    # Inside

    def _put_spread(
        self, keys: list[str], addresses: Pieces, sizes: Pieces, config: ReplicateConfig, upsert: bool = False
    ) -> list[int]:
        if config.prefer_alloc_in_same_node:
            return [codes.INVALID_PARAMS] * len(keys)
        return self._put_all(keys, addresses, sizes, config, upsert=upsert)

    def _put_all(
        self,
        keys: list[str],
        addresses: Pieces,
        sizes: Pieces,
        config: ReplicateConfig,
        *,
        upsert: bool = False,
        foreign: bool = True,
    ) -> list[int]:
        """`foreign`: the memory is the caller's, so it may be unregistered or unmapped."""
        if not len(keys) == len(addresses) == len(sizes) or list(map(len, addresses)) != list(map(len, sizes)):
            return [codes.INVALID_PARAMS] * len(keys)
        totals = [sum(lengths) for lengths in sizes]
        started = self._ask("put_start", keys, totals, self._client, config, upsert)
        if isinstance(started, int):
            return [started] * len(keys)
        results, slices = [], Slices(self._limited)
        for (code, replicas), pointers, lengths in zip(started, addresses, sizes, strict=True):
            if code == codes.OK:
                code = self._write(replicas, pointers, lengths, slices, foreign)
                results.append(code)
            else:
                results.append(codes.OK if code == codes.OBJECT_ALREADY_EXISTS else code)
        self._pass_transfer_time()
        begun = [i for i, (code, _) in enumerate(started) if code == codes.OK]
        written, failed = [i for i in begun if results[i] == codes.OK], [i for i in begun if results[i] != codes.OK]
        if failed:
            self._ask("put_revoke", [keys[i] for i in failed], self._client)
        if written:
            ended = self._ask_each("put_end", [keys[i] for i in written], self._client)
            for i, code in zip(written, ended, strict=True):
                results[i] = code
        return results

    def _write(
        self, replicas: Sequence[Replica], addresses: Sequence[int], sizes: Sequence[int], slices: Slices, foreign: bool
    ) -> int:
        """Copy an object to all its replicas: `OK` or `TRANSFER_FAIL`."""
        for replica in replicas:
            reach = self._reach(replica, addresses, sizes, slices, foreign)
            target = self._memory_of(replica) if reach.access is Access.OK else None
            if target is None:
                return codes.TRANSFER_FAIL
            gather(target, replica.offset, addresses, sizes, reach.region)
        return codes.OK

    def _reach(
        self, replica: Replica, addresses: Sequence[int], sizes: Sequence[int], slices: Slices, foreign: bool
    ) -> Reach:
        """What the transport finds at the caller's memory. Raises `WouldCrashError` where it would crash."""
        own = self._is_own(replica)
        if not own and slices.too_many(len(sizes) - sizes.count(0)):
            return NOT_SENT
        reach = self._memory.reach(addresses, sizes) if foreign else ALL_OURS
        if reach.access is Access.UNMAPPED and own:
            pieces = [f"{size} bytes at {address:#x}" for address, size in zip(addresses, sizes, strict=False)]
            raise WouldCrashError(f"a transfer with the client's own segment touches unmapped memory: {pieces[:8]}")
        return reach

    def _get_all(
        self, keys: list[str], addresses: Pieces, sizes: Pieces, *, exact: bool, foreign: bool = True
    ) -> list[int]:
        if not len(keys) == len(addresses) == len(sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        last = {key: i for i, key in enumerate(keys)}
        found, slices = self._query(keys), Slices(self._limited)
        results = [
            self._get(one, pointers, lengths, slices, exact, foreign, fill=last[key] == i)
            for i, (key, one, pointers, lengths) in enumerate(zip(keys, found, addresses, sizes, strict=True))
        ]
        if not any(code > 0 for code in results):
            return results
        self._pass_transfer_time()
        now = self._now()
        # What was read under a lease that has run out may be another object's bytes by now.
        return [
            codes.LEASE_EXPIRED if code > 0 and now >= one.lease_end else code
            for code, one in zip(results, found, strict=True)
        ]

    def _get(
        self,
        found: Lookup,
        addresses: Sequence[int],
        sizes: Sequence[int],
        slices: Slices,
        exact: bool,
        foreign: bool,
        fill: bool,
    ) -> int:
        if found.code != codes.OK:
            return found.code
        total = sum(sizes)
        if total < found.num_bytes:
            return codes.INVALID_PARAMS
        if exact and (total > found.num_bytes or any(sizes[len(addresses) :])):
            return codes.TRANSFER_FAIL
        if not exact:
            sizes = [found.num_bytes]
        replica = next((one for one in found.replicas if self._is_own(one)), found.replicas[0])
        reach = self._reach(replica, addresses, sizes, slices, foreign)
        source = self._memory_of(replica) if reach.access is Access.OK else None
        if source is None:
            return codes.TRANSFER_FAIL
        if fill:
            scatter(source, replica.offset, addresses, sizes, reach.region)
        return found.num_bytes


def one_each(addresses: Sequence[int], sizes: Sequence[int]) -> tuple[Pieces, Pieces]:
    """One piece a key."""
    return [[address] for address in integers(addresses)], [[size] for size in integers(sizes)]
