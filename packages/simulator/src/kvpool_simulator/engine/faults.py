"""What goes wrong, each site from a random stream of its own, so that one fault more moves no other."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

from kvpool_simulator.engine.tasks import Tasks
from kvpool_simulator.engine.threads import ThreadKilled
from kvpool_simulator.store import MooncakeDistributedStore, ReplicateConfig, codes

CODES = (
    codes.NO_AVAILABLE_HANDLE,
    codes.INVALID_PARAMS,
    codes.ILLEGAL_CLIENT,
    codes.REPLICA_IS_NOT_READY,
    codes.OBJECT_NOT_FOUND,
    codes.OBJECT_ALREADY_EXISTS,
    codes.OBJECT_HAS_LEASE,
    codes.LEASE_EXPIRED,
    codes.TRANSFER_FAIL,
    codes.RPC_FAIL,
    codes.RPC_TIMEOUT,
    -1,
    -12345,
)
"""Every code that Mooncake gives, and two that it does not."""
RPC_LIMIT_S = 5.0
"""How long a call to a master that hangs takes."""
FOREVER_S = 1e6


class Faults:
    """Rates by site. A site without a rate never fails; after `lift` none does."""

    def __init__(self, seed: int, rates: Mapping[str, float]) -> None:
        self._seed = seed
        self._rates = dict(rates)
        self._streams: dict[str, Random] = {}
        self.lifted = False
        self.counts: Counter[str] = Counter()

    def lift(self) -> None:
        """From now on all is well."""
        self.lifted = True

    def stream(self, site: str) -> Random:
        """The site's own random numbers."""
        if site not in self._streams:
            self._streams[site] = Random(f"{self._seed}/{site}")
        return self._streams[site]

    def strikes(self, site: str) -> bool:
        """Whether it fails this time."""
        rate = self._rates.get(site, 0.0)
        if not rate or self.lifted or self.stream(site).random() >= rate:
            return False
        self.counts[site] += 1
        return True


def faulty_store(tasks: Tasks, faults: Faults, latency_s: Callable[[], float], longest_s: float) -> SimpleNamespace:
    """A module like `mooncake.store` whose clients take time and fail.

    Sites: `code` (one key's or every key's answer), `short_list`, `none`, `raise`, `short_read`, `late` (at most
    `longest_s`), `never`, `evict` (objects go between lookup and get), `kill` (the thread dies), `lie` (a put says 0
    and stores nothing).
    """

    reading: Counter[str] = Counter()

    class FaultyStore(MooncakeDistributedStore):
        """One client."""

        def batch_is_exist(self, keys: list[str]) -> Any:
            return self._through("exist", keys, lambda: super(FaultyStore, self).batch_is_exist(keys))

        def batch_put_from_multi_buffers(
            self, keys: list[str], addresses: Any, sizes: Any, config: ReplicateConfig | None = None
        ) -> Any:
            if faults.strikes("lie"):
                return [codes.OK] * len(keys)
            put = super().batch_put_from_multi_buffers
            return self._through("put", keys, lambda: put(keys, addresses, sizes, config or ReplicateConfig()))

        def batch_get_into_multi_buffers(
            self, keys: list[str], addresses: Any, sizes: Any, prefer_alloc_in_same_node: bool = False
        ) -> Any:
            self._evict(keys)
            get = super().batch_get_into_multi_buffers
            answers = self._through("get", keys, lambda: get(keys, addresses, sizes))
            return _spoilt(answers, addresses, sizes)

        def batch_put_session_start(
            self, keys: list[str], sizes: Sequence[int], config: ReplicateConfig | None = None
        ) -> Any:
            start = super().batch_put_session_start
            return self._through("put_start", keys, lambda: start(keys, sizes, config or ReplicateConfig()))

        def batch_put_from_multi_buffer_ranges(self, keys: list[str], addresses: Any, sizes: Any, offsets: Any) -> Any:
            put = super().batch_put_from_multi_buffer_ranges
            return self._through("put_ranges", keys, lambda: put(keys, addresses, sizes, offsets))

        def batch_put_session_end(self, keys: list[str]) -> Any:
            end = super().batch_put_session_end
            return self._through("put_end", keys, lambda: end(keys))

        def batch_get_session_start(self, keys: list[str]) -> Any:
            self._evict(keys)
            reading.update(keys)
            start = super().batch_get_session_start
            return self._through("get_start", keys, lambda: start(keys))

        def batch_get_into_multi_buffer_ranges(self, keys: list[str], addresses: Any, sizes: Any, offsets: Any) -> Any:
            get = super().batch_get_into_multi_buffer_ranges
            answers = self._through("get", keys, lambda: get(keys, addresses, sizes, offsets))
            return _spoilt(answers, addresses, sizes)

        def batch_get_session_end(self, keys: list[str]) -> int:
            reading.subtract(keys)
            return super().batch_get_session_end(keys)

        def _evict(self, keys: Sequence[str]) -> None:
            """An object goes between lookup and read; never one that a lease of a session protects."""
            if faults.strikes("evict"):
                chosen = faults.stream("evict-key").choice(keys)
                if reading[chosen] <= 0:
                    super().remove(chosen, True)

        def _through(self, call: str, keys: Sequence[str], do: Callable[[], Any]) -> Any:
            tasks.sleep(latency_s())
            service = self._service
            if service is not None and service.failure == codes.RPC_TIMEOUT:
                tasks.sleep(RPC_LIMIT_S)
            random = faults.stream(f"{call}-how")
            if faults.strikes("late"):
                # Just too late does other harm than very late.
                tasks.sleep(random.choice((0.1, 0.5, longest_s)) * random.random())
            if faults.strikes("never"):
                tasks.wait(lambda: faults.lifted, FOREVER_S)
                return [codes.RPC_TIMEOUT] * len(keys)
            if faults.strikes("kill"):
                raise ThreadKilled
            if faults.strikes("raise"):
                raise RuntimeError("a fault of the store's own")
            if faults.strikes("code"):
                code = random.choice(CODES)
                if random.random() < 0.5:
                    return [code] * len(keys)
                answers = do()
                chosen = random.randrange(len(keys)) if keys else 0
                return [code if i == chosen else answer for i, answer in enumerate(answers)]
            answers = do()
            if call == "get" and faults.strikes("short_read"):
                return [answer - 1 if answer > 0 else answer for answer in answers]
            if faults.strikes("none"):
                return None
            if faults.strikes("short_list"):
                return answers[:-1]
            return answers

    return SimpleNamespace(MooncakeDistributedStore=FaultyStore, ReplicateConfig=ReplicateConfig)


def _spoilt(answers: Any, addresses: Any, sizes: Any) -> Any:
    """The answers of a read; what was not read well holds anything."""
    if isinstance(answers, list):
        for answer, pieces, lengths in zip(answers, addresses, sizes, strict=False):
            if not isinstance(answer, int) or answer != sum(lengths):
                _spoil(pieces, lengths)
    return answers


def _spoil(pieces: Sequence[int], lengths: Sequence[int]) -> None:
    """Whatever failed may have left anything behind."""
    for address, length in zip(pieces, lengths, strict=True):
        ctypes.memset(address, 0x77, length)
