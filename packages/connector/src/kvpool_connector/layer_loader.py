"""Loads a step's blocks layer by layer while the step computes: a layer waits for its own bytes alone."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from kvpool_connector.answers import statuses_of
from kvpool_connector.contract.clock import Clock
from kvpool_connector.contract.device import DeviceLateError, Event
from kvpool_connector.contract.status import Status
from kvpool_connector.counters import Counters
from kvpool_connector.layer_plan import LayerPlan, LayerRange
from kvpool_connector.layer_transfer import LayerTransfer
from kvpool_connector.loader import Leave
from kvpool_connector.outage import Outage
from kvpool_connector.rank_part import ShardBlocks
from kvpool_connector.transfer import parts, tell_late

logger = logging.getLogger(__name__)

RANGES_IN_FLIGHT = 2
"""One range is copied to the cache while the next is on the wire."""
MAX_TOLD = 8
"""Requests that one line of the log names."""


@dataclass
class _Object:
    """One block's object while it is read."""

    request_id: str
    key: str
    block_id: int
    sums: bytes = b""
    """The checksums that it carries; empty where it is not compared."""
    status: Status = Status.OK


@dataclass
class _Part:
    """Objects of one shard that are moved together, all their ranges in turn."""

    shard: int
    objects: list[_Object]
    left: int
    """Ranges that have not ended."""
    begin: threading.Lock = field(default_factory=lambda: threading.Lock())
    begun_at: float | None = None


class LayerLoad(Leave):
    """One step's load."""

    def __init__(
        self,
        deadline: float,
        clock: Clock,
        event: Event,
        parts: Sequence[_Part],
        pieces: Sequence[tuple[LayerRange, _Part]],
    ) -> None:
        super().__init__(deadline, clock, event)
        self.parts = parts
        self.queue = list(reversed(pieces))
        """Ranges that have not been asked for; the next one last."""
        self.missing = Counter((piece.shard, piece.index) for piece, _ in pieces)
        """By shard and range index, parts that have not landed, well or not."""
        self.waited: Counter[str] = Counter()
        """Wait hooks called in this step."""

    @property
    def objects(self) -> list[_Object]:
        """All blocks of the load."""
        return [one for part in self.parts for one in part.objects]

    def landed(self, piece: LayerRange) -> None:
        """One part of a range has ended."""
        with self._changed:
            self.missing[piece.shard, piece.index] -= 1
            self._changed.notify_all()

    def wait(self, places: Iterable[tuple[int, int]], timeout_s: float) -> bool:
        """True once all parts of these ranges have ended; False when that took longer than `timeout_s` seconds."""
        wanted = list(places)
        with self._changed:
            return self._changed.wait_for(lambda: not any(self.missing[place] for place in wanted), timeout_s)

    @property
    def withdrawn(self) -> bool:
        """True when nothing of this load shall be written any more."""
        return self._withdrawn


class LayerLoader:
    """Reads ranges of layers out of get sessions, in the order in which the step needs them."""

    def __init__(
        self,
        transfer: LayerTransfer,
        plan: LayerPlan,
        object_bytes: Sequence[int],
        outage: Outage,
        counters: Counters,
        clock: Clock,
        timeout_s: float,
        renew_s: float,
        prefetch_layers: int | None,
    ) -> None:
        """`object_bytes`: by shard. `renew_s`: age at which a get session is renewed, well below the store's lease.
        `prefetch_layers`: how far loads run ahead of the layer that computes; None for as far as the transport gets."""
        self._transfer = transfer
        self._store = transfer.store
        self._plan = plan
        self._object_bytes = object_bytes
        self._outage = outage
        self._counters = counters
        self._clock = clock
        self._timeout_s = timeout_s
        self._renew_s = renew_s
        self._prefetch_layers = prefetch_layers
        self._told: set[str] = set()
        self._readers: Counter[str] = Counter()
        """Parts that read from a key's session. A client has one for all, and a load given up may end late."""
        self._broken: set[str] = set()
        """Keys whose objects are not what was saved. They are removed when the last reader is done: before that its
        ranges would read what takes their place."""
        self._sessions = threading.Lock()
        self._threads = ThreadPoolExecutor(RANGES_IN_FLIGHT, thread_name_prefix="kvpool-layer-loader")

    def start(self, loads: Mapping[str, Sequence[ShardBlocks]], event: Event) -> LayerLoad:
        """Begin to fill blocks, by request, none before `event`. Returns when the step may begin to compute."""
        by_shard: dict[int, list[_Object]] = {}
        for request_id, shards in loads.items():
            for shard in shards:
                by_shard.setdefault(shard.shard, []).extend(
                    _Object(request_id, key, block_id)
                    for key, block_id in zip(shard.keys, shard.block_ids, strict=True)
                )
        all_parts: list[_Part] = []
        pieces: list[tuple[LayerRange, _Part]] = []
        for number, objects in by_shard.items():
            ranges = self._plan.ranges[number]
            size = min(self._transfer.per_call(piece) for piece in ranges)
            for part in parts(len(objects), size):
                all_parts.append(_Part(number, objects[part], len(ranges)))
                pieces += [(piece, all_parts[-1]) for piece in ranges]
        pieces.sort(key=lambda pair: pair[0].index)
        load = LayerLoad(self._clock.now() + self._timeout_s, self._clock, event, all_parts, pieces)
        first = self._plan.needed.get("", frozenset())
        self._ask(load, max((index for _, index in first), default=0))
        self._wait(load, "")
        return load

    def wait(self, load: LayerLoad, hook: str) -> None:
        """A layer's wait hook: returns when all that the layer reads has landed, or when the load's time is up."""
        load.waited[hook] += 1
        places = self._plan.needed.get(hook)
        if places:
            self._ask(load, max(index for _, index in places))
            self._wait(load, hook)

    def settle(self, load: LayerLoad) -> dict[str, list[int]]:
        """The step's end: by request the blocks that do not hold their content; nothing is written after this."""
        self._fail_unwaited(load)
        if any(load.missing.values()):
            self._withdraw(load)
        # A store that has not answered in time is as good as down, though its answer may come yet.
        self._outage.note([one.status for one in load.objects if one.status is Status.TIMEOUT])
        failed: dict[str, list[int]] = {one.request_id: [] for one in load.objects}
        reasons: Counter[Status] = Counter()
        for one in load.objects:
            if not one.status.ok:
                failed[one.request_id].append(one.block_id)
                reasons[one.status] += 1
        self._counters.add("load_blocks_ok", len(load.objects) - reasons.total())
        num_bytes = sum(self._object_bytes[part.shard] for part in load.parts for one in part.objects if one.status.ok)
        self._counters.add("load_bytes", num_bytes)
        for status, count in reasons.items():
            self._counters.add(f"load_blocks_{status.value}", count)
        if reasons:
            hit = [request_id for request_id, blocks in failed.items() if blocks]
            logger.warning(
                "event=load_failed requests=%s%s blocks=%d of=%d %s: they are computed instead",
                ",".join(hit[:MAX_TOLD]),
                f" and {len(hit) - MAX_TOLD} more" if len(hit) > MAX_TOLD else "",
                reasons.total(),
                len(load.objects),
                " ".join(f"{status.value}={count}" for status, count in reasons.items()),
            )
        return failed

    def close(self) -> None:
        """Wait for ranges under way (the transport bounds them) and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _fail_unwaited(self, load: LayerLoad) -> None:
        """A layer that did not wait may have read what had not landed: its shard's blocks count as not loaded.

        One that waited twice may be two layers, of which the other is not known here.
        """
        for part in load.parts:
            for hook in sorted(self._plan.hooks(part.shard)):
                calls = load.waited[hook]
                if calls == 1 or (calls > 1 and hook in self._plan.repeating):
                    continue
                self._counters.add("load_hook_faults")
                if hook not in self._told:
                    self._told.add(hook)
                    logger.error(
                        "event=load_hook layer=%s calls=%d expected=1: the engine did not wait once for this layer's "
                        "load before it computed it, so the step's loaded blocks are computed again. A fused or "
                        "captured attention that goes round the hook is the usual cause; run with piecewise graphs or "
                        "eagerly, or set use_layerwise to false",
                        hook,
                        calls,
                    )
                for one in part.objects:
                    one.status = Status.INVALID if one.status.ok else one.status

    def _wait(self, load: LayerLoad, hook: str) -> None:
        places = self._plan.needed.get(hook, frozenset())
        if not load.wait(places, max(0.0, load.deadline - self._clock.now())):
            self._withdraw(load)

    def _withdraw(self, load: LayerLoad) -> None:
        """The load's time is up: blocks of which anything has not landed have failed and will not be touched."""
        load.withdraw()
        for part in load.parts:
            if part.left:
                for one in part.objects:
                    one.status = Status.TIMEOUT if one.status.ok else one.status
        # What was never asked for ends at once, and closes its sessions.
        while load.queue:
            self._threads.submit(self._move, load, *load.queue.pop())

    def _ask(self, load: LayerLoad, reached: int) -> None:
        """Put ranges on their way, up to `prefetch_layers` beyond the range that computes."""
        while load.queue:
            piece = load.queue[-1][0]
            ahead = 0 if self._prefetch_layers is None else -(-self._prefetch_layers // len(piece.layout.layers))
            if ahead and piece.index > reached + ahead:
                return
            self._threads.submit(self._move, load, *load.queue.pop())

    def _move(self, load: LayerLoad, piece: LayerRange, part: _Part) -> None:
        fault: Status | None = Status.UNAVAILABLE
        try:
            if not load.withdrawn:
                self._read(load, piece, part)
                fault = None
            else:
                # Whoever withdrew may look at what is left of this part only after it has ended.
                fault = Status.TIMEOUT
        except DeviceLateError as error:
            tell_late(error, len(part.objects))
            fault = Status.DEVICE_LATE
        except Exception:
            # Whatever breaks here, the request goes on: its blocks count as not loaded and are computed.
            logger.exception("event=load_raised blocks=%d", len(part.objects))
        finally:
            if fault is not None:
                for one in part.objects:
                    one.status = fault if one.status.ok else one.status
            with part.begin:
                part.left -= 1
                last = not part.left
            if last and part.begun_at is not None:
                self._end([one.key for one in part.objects])
            load.landed(piece)

    def _read(self, load: LayerLoad, piece: LayerRange, part: _Part) -> None:
        self._begin(part)
        some = [one for one in part.objects if one.status.ok]
        if not some:
            return
        statuses, broken = self._transfer.load(
            piece, [one.key for one in some], [one.block_id for one in some], load, [one.sums for one in some]
        )
        if broken:
            with self._sessions:
                self._broken.update(broken)
        self._outage.note(statuses)
        for one, status in zip(some, statuses, strict=True):
            if not status.ok:
                one.status = status

    def _begin(self, part: _Part) -> None:
        """Open the sessions, or renew them before their lease ends; whoever comes meanwhile waits."""
        with part.begin:
            now = self._clock.now()
            if part.begun_at is not None and now - part.begun_at < self._renew_s:
                return
            some = [one for one in part.objects if one.status.ok]
            first = part.begun_at is None
            with self._sessions:
                if first:
                    self._readers.update(one.key for one in part.objects)
                statuses = statuses_of(self._store.begin_get, [one.key for one in some])
            part.begun_at = now
            self._outage.note(statuses)
            for one, status in zip(some, statuses, strict=True):
                if not status.ok:
                    one.status = status
            if first:
                self._read_sums(part)

    def _read_sums(self, part: _Part) -> None:
        """What the layers of the objects that shall be compared are compared with."""
        some = [one for one in part.objects if one.status.ok and self._transfer.sampled(part.shard)]
        if not some:
            return
        statuses, sums = self._transfer.load_sums(part.shard, [one.key for one in some])
        self._outage.note(statuses)
        for one, status, found in zip(some, statuses, sums, strict=True):
            one.status, one.sums = status, found

    def _end(self, keys: Sequence[str]) -> None:
        with self._sessions:
            self._readers.subtract(keys)
            unread = [key for key in dict.fromkeys(keys) if not self._readers[key]]
            for key in unread:
                del self._readers[key]
            try:
                self._store.end_get(unread)
            except Exception:
                # A session that stays open holds a lease that runs out by itself.
                logger.exception("event=store_raised call=end_get keys=%d", len(unread))
            broken = [key for key in unread if key in self._broken]
            self._broken.difference_update(broken)
        # As long as it is there it is found again, and nobody puts a right one in its place.
        statuses_of(partial(self._store.remove, force=True), broken)
