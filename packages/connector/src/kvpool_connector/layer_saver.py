"""Saves a step's blocks layer by layer while the step computes: an object appears when its last layer is in."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from kvpool_connector.answers import statuses_of
from kvpool_connector.audit import Audit
from kvpool_connector.contract.clock import Clock
from kvpool_connector.contract.device import DeviceLateError, Event
from kvpool_connector.contract.status import Status
from kvpool_connector.counters import Counters
from kvpool_connector.events import StoredKeys
from kvpool_connector.fence import Fence, Ticket
from kvpool_connector.layer_plan import LayerPlan, LayerRange
from kvpool_connector.layer_transfer import LayerTransfer
from kvpool_connector.outage import Outage
from kvpool_connector.rank_part import ShardBlocks
from kvpool_connector.saver import count_saved, end_spans
from kvpool_connector.tracing import SaveSpan
from kvpool_connector.transfer import parts, tell_late

logger = logging.getLogger(__name__)

RANGES_IN_FLIGHT = 2
"""One range is copied to staging while another is on the wire."""
MAX_STUCK = 65536
"""Keys that are remembered because their sessions could not be let go of; some 20 MB."""
GONE = (Status.OK, Status.INVALID)
"""Answers to a revoke after which the client has no session of that key."""


@dataclass
class _Object:
    """One block's object while it is written."""

    key: str
    block_id: int
    left: int
    """Ranges that are not in yet."""
    sums: bytearray
    """Its checksums, as far as its ranges are in; empty where none are made."""
    mine: bool = False
    """Its key's session is this object's to begin and to end."""
    opened: bool = False
    """A session may be open in the store."""
    status: Status | None = None
    """How it ended: stored, there already, or refused by the store."""
    span: SaveSpan | None = None
    fault: str = ""
    """Why it must not appear although the store did not refuse it."""

    @property
    def open(self) -> bool:
        return self.status is None and not self.fault


@dataclass
class _Shard:
    """A shard's part of a step's save."""

    objects: list[_Object]
    ticket: Ticket
    begin: threading.Lock = field(default_factory=lambda: threading.Lock())
    begun_at: float | None = None


class LayerSave:
    """One step's save. Hooks of the step's thread mark layers as computed; two threads move them."""

    def __init__(self, shards: dict[int, _Shard], saves: Sequence[ShardBlocks]) -> None:
        self.shards = shards
        self.saves = saves
        self.fired: Counter[str] = Counter()
        """Save hooks called in this step."""
        self.sent: set[tuple[int, int]] = set()
        """Ranges that are on their way, by shard and index."""
        self.lock = threading.Lock()
        self.tasks = 1
        """Tasks that have not ended, and one for the step itself."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all shards."""
        return sum(len(shard.objects) for shard in self.shards.values())


class LayerSaver:
    """Writes ranges of layers into put sessions, and ends, or revokes, the sessions.

    An object is ended only when every one of its ranges was written, by this saver's own count, within the session's
    limit, and every hook of its layers was called as often as it should. All others are revoked. Once a session is
    older than the limit nothing is written to it: past the store's release time-out its memory is somebody else's.
    """

    def __init__(
        self,
        transfer: LayerTransfer,
        plan: LayerPlan,
        object_bytes: Sequence[int],
        fence: Fence,
        outage: Outage,
        counters: Counters,
        clock: Clock,
        max_queued_blocks: int,
        event_timeout_s: float,
        session_limit_s: float,
        audits: Sequence[Audit | None],
        stored: StoredKeys | None = None,
    ) -> None:
        """`object_bytes` and `audits`: by shard. `session_limit_s` must lie below the store's discard time-out."""
        self._transfer = transfer
        self._store = transfer.store
        self._plan = plan
        self._object_bytes = object_bytes
        self._fence = fence
        self._outage = outage
        self._counters = counters
        self._clock = clock
        self._max_queued_blocks = max_queued_blocks
        self._event_timeout_s = event_timeout_s
        self._audits = audits
        self._stored = stored
        self._session_limit_s = session_limit_s
        self._num_queued = 0
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._writing: set[str] = set()
        """Keys that some object under way has to itself. The store knows sessions by key: to end or revoke one would
        end, or revoke, what another object of that key has half written."""
        self._stuck: set[str] = set()
        """Keys whose sessions this client could not let go of, since the store had given them to another."""
        self._threads = ThreadPoolExecutor(RANGES_IN_FLIGHT, thread_name_prefix="kvpool-layer-saver")

    def open(self, saves: Sequence[ShardBlocks]) -> LayerSave | None:
        """Before a step computes: these blocks will be complete at its end. None when there is nothing to do."""
        by_shard: dict[int, list[_Object]] = {}
        for save in saves:
            num_ranges = len(self._plan.ranges[save.shard])
            objects = by_shard.setdefault(save.shard, [])
            objects += [
                _Object(key, block_id, num_ranges, bytearray(self._transfer.sums_bytes[save.shard]), span=save.span)
                for key, block_id in zip(save.keys, save.block_ids, strict=True)
            ]
        num_blocks = sum(map(len, by_shard.values()))
        if not num_blocks:
            return None
        if self._outage.active:
            self._counters.add("save_blocks_dropped_outage", num_blocks)
            end_spans(saves)
            return None
        with self._lock:
            fits = self._num_queued + num_blocks <= self._max_queued_blocks
            if fits:
                self._num_queued += num_blocks
        if not fits:
            self._counters.add("save_blocks_dropped_queue_full", num_blocks)
            end_spans(saves)
            return None
        self._counters.add("save_queue_entered", num_blocks)
        return LayerSave(
            {
                shard: _Shard(
                    objects,
                    self._fence.ticket((one.block_id for one in objects), len(self._plan.ranges[shard])),
                )
                for shard, objects in by_shard.items()
            },
            saves,
        )

    def computed(self, save: LayerSave, hook: str, event: Event) -> None:
        """A layer's save hook: ranges whose layers are all computed once `event` has happened go on their way."""
        save.fired[hook] += 1
        for piece in self._plan.due.get(hook, ()):
            if piece.shard in save.shards and not piece.after_step and all(save.fired[name] for name in piece.ready):
                self._send(save, piece, event)

    def close(self, save: LayerSave, event: Event | None) -> None:
        """The step's end: what waits for it goes on its way, and what no hook vouches for is given up.

        `event` is None for a step that broke off: nothing of it is stored.
        """
        for number, shard in save.shards.items():
            fault = self._fault(save, number) if event else "step_broken"
            if fault:
                for one in shard.objects:
                    one.fault = one.fault or fault
            elif event:
                for piece in self._plan.ranges[number]:
                    self._send(save, piece, event)
        # Not here: ending the sessions asks the store, and this is the step's thread.
        self._threads.submit(self._ended, save)

    def finish(self) -> bool:
        """Wait for what is under way (the transport bounds it) and end the threads; True when they have ended."""
        self._threads.shutdown(wait=True)
        return True

    def _fault(self, save: LayerSave, shard: int) -> str:
        """Why a shard's objects of this step must not appear; told once for each layer."""
        for hook in sorted(self._plan.hooks(shard)):
            calls = save.fired[hook]
            if calls == 1 or (calls > 1 and hook in self._plan.repeating):
                continue
            self._counters.add("save_hook_faults")
            if hook not in self._told:
                self._told.add(hook)
                logger.error(
                    "event=save_hook layer=%s calls=%d expected=1: the engine did not say once that this layer is "
                    "computed, so the step's blocks are not stored. A fused or captured attention that goes round the "
                    "hook is the usual cause; run with piecewise graphs or eagerly, or set use_layerwise to false",
                    hook,
                    calls,
                )
            return "hooks"
        return ""

    def _send(self, save: LayerSave, piece: LayerRange, event: Event) -> None:
        place = (piece.shard, piece.index)
        if place in save.sent:
            return
        save.sent.add(place)
        with save.lock:
            save.tasks += 1
        self._threads.submit(self._move, save, piece, event)

    def _move(self, save: LayerSave, piece: LayerRange, event: Event) -> None:
        shard = save.shards[piece.shard]
        try:
            self._write(save, shard, piece, event)
        except DeviceLateError as error:
            tell_late(error, len(shard.objects))
            self._give_up(save, shard.objects, "device_late")
        except Exception:
            # Whatever breaks, the objects are simply not stored.
            logger.exception("event=layer_save_failed blocks=%d", len(shard.objects))
            with save.lock:
                for one in shard.objects:
                    one.fault = one.fault or "failed"
        finally:
            self._ended(save)

    def _write(self, save: LayerSave, shard: _Shard, piece: LayerRange, event: Event) -> None:
        if not event.wait(self._event_timeout_s):
            logger.error("event=device_late limit_s=%g blocks=%d: not stored", self._event_timeout_s, save.num_blocks)
            self._give_up(save, shard.objects, "device_late")
            return
        self._begin(shard, piece)
        moving = [one for one in shard.objects if one.open]
        for part in parts(len(moving), self._transfer.per_call(piece)):
            # Checked again for each part: another range of the same object may have failed meanwhile.
            some = [one for one in moving[part] if one.open]
            statuses = self._transfer.save(
                piece,
                [one.key for one in some],
                [one.block_id for one in some],
                shard.ticket,
                lambda: self._fresh(shard),
                [one.sums for one in some],
            )
            with save.lock:
                for one, status in zip(some, statuses, strict=True):
                    if status is Status.OK:
                        one.left -= 1
                    elif status is not None:
                        one.status = one.status or status
            lost = [one for one, status in zip(some, statuses, strict=True) if status is None]
            self._give_up(save, lost, "overwritten" if self._fresh(shard) else "stale")
        shard.ticket.drop([one.block_id for one in shard.objects if not one.open])

    def _begin(self, shard: _Shard, piece: LayerRange) -> None:
        """Open the sessions, once; whoever comes meanwhile waits."""
        with shard.begin:
            if shard.begun_at is not None:
                return
            # Taken before the call, so that the age is never thought less than it is.
            begun_at = self._clock.now()
            self._claim(shard)
            self._unstick(shard)
            begun = [one for one in shard.objects if one.open]
            keys = [one.key for one in begun]
            statuses = statuses_of(self._store.begin_put, keys, [self._object_bytes[piece.shard]] * len(keys))
            for one, status in zip(begun, statuses, strict=True):
                one.opened = status.ok or status.outage
                if not status.ok:
                    one.status = status
            shard.begun_at = begun_at

    def _claim(self, shard: _Shard) -> None:
        """Have the keys to oneself; what another object has is being written already."""
        with self._lock:
            for one in shard.objects:
                one.mine = one.key not in self._writing
                if one.mine:
                    self._writing.add(one.key)
                else:
                    one.status = Status.EXISTS

    def _unclaim(self, shard: _Shard) -> None:
        with self._lock:
            self._writing.difference_update([one.key for one in shard.objects if one.mine])

    def _unstick(self, shard: _Shard) -> None:
        """Let go of sessions that another writer took: the store allows it once that one's object is gone."""
        stuck = [one for one in shard.objects if one.mine and one.key in self._stuck]
        for one, status in zip(stuck, self._revoked([one.key for one in stuck]), strict=True):
            if status not in GONE:
                one.fault = one.fault or "lost"

    def _revoked(self, keys: Sequence[str]) -> list[Status]:
        """Let go of sessions, and remember those that stay; `INVALID` is a key that has none."""
        statuses = statuses_of(self._store.revoke_put, keys)
        for key, status in zip(keys, statuses, strict=True):
            if status in GONE:
                self._stuck.discard(key)
            elif len(self._stuck) < MAX_STUCK:
                self._stuck.add(key)
        return statuses

    def _fresh(self, shard: _Shard) -> bool:
        return shard.begun_at is not None and self._clock.now() - shard.begun_at < self._session_limit_s

    def _give_up(self, save: LayerSave, objects: Iterable[_Object], fault: str) -> None:
        with save.lock:
            for one in objects:
                one.fault = one.fault or fault

    def _ended(self, save: LayerSave) -> None:
        """A task has ended; the last one ends the sessions."""
        with save.lock:
            save.tasks -= 1
            if save.tasks:
                return
        try:
            for index, shard in save.shards.items():
                self._end(index, shard)
        except Exception:
            # Nobody asks this thread how it went; what was not ended is not visible.
            logger.exception("event=layer_save_failed blocks=%d", save.num_blocks)
        finally:
            for shard in save.shards.values():
                self._unclaim(shard)
            with self._lock:
                self._num_queued -= save.num_blocks
            self._counters.add("save_queue_left", save.num_blocks)
            end_spans(save.saves)
            # Last, since whoever drains waits for this.
            for shard in save.shards.values():
                shard.ticket.close()

    def _end(self, number: int, shard: _Shard) -> None:
        if shard.begun_at is not None and not self._fresh(shard):
            for one in shard.objects:
                one.fault = one.fault or "stale"
        for one in shard.objects:
            if one.open and one.left:
                one.fault = "incomplete"
        self._seal(number, shard)
        whole = [one for one in shard.objects if one.open]
        for one, status in zip(whole, statuses_of(self._store.end_put, [one.key for one in whole]), strict=True):
            if status.ok or status.outage:
                one.status = status
            else:
                # Another writer has the key, or the store gave the session up: nothing is stored by this one.
                one.fault = "lost"
        self._revoked([one.key for one in shard.objects if one.opened and one.status is not Status.OK])
        if audit := self._audits[number]:
            stored = [one for one in whole if one.status is Status.OK]
            expect = partial(self._transfer.expect, [one.sums for one in stored])
            found = audit.check([one.key for one in stored], [Status.OK] * len(stored), expect)
            for one, status in zip(stored, found, strict=True):
                one.status = status
        ended = [one.status for one in shard.objects if one.status]
        if self._stored is not None:
            # Of a key that is there when a session begins another writer may be in the middle, and give it up.
            keys = [one.key for one in shard.objects if one.status is Status.OK]
            self._stored.note(keys, [Status.OK] * len(keys))
        for one in shard.objects:
            if one.span is not None:
                one.span.count([one.status])
        count_saved(ended, self._object_bytes[number], self._outage, self._counters)
        for fault, count in Counter(one.fault for one in shard.objects if one.fault and not one.status).items():
            self._counters.add(f"save_blocks_dropped_{fault}", count)

    def _seal(self, number: int, shard: _Shard) -> None:
        """Write the checksums of the objects that are whole."""
        whole = [one for one in shard.objects if one.open]
        try:
            statuses = self._transfer.seal(
                number, [one.key for one in whole], [one.sums for one in whole], lambda: self._fresh(shard)
            )
        except DeviceLateError as error:
            tell_late(error, len(whole))
            for one in whole:
                one.fault = "device_late"
            return
        for one, status in zip(whole, statuses, strict=True):
            if status is None:
                one.fault = "stale" if not self._fresh(shard) else "incomplete"
            elif not status.ok:
                one.status = status
