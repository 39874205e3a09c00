"""Saves blocks off the step's path: a bounded queue and one thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvpool_connector.contract.device import Event
from kvpool_connector.contract.status import Status
from kvpool_connector.counters import Counters
from kvpool_connector.events import StoredKeys
from kvpool_connector.fence import Fence, Ticket
from kvpool_connector.outage import Outage
from kvpool_connector.rank_part import ShardBlocks
from kvpool_connector.transfer import Transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    event: Event
    saves: Sequence[ShardBlocks]
    tickets: Sequence[Ticket]
    """One a save: several shards of a block are read one after the other."""
    num_blocks: int


class Saver:
    """Takes jobs at a step's end and stores them while the engine goes on.

    A job that does not fit the queue, whose event does not come, or that meets an outage is dropped and counted: a save
    that does not happen is a later miss.
    """

    def __init__(
        self,
        transfers: Sequence[Transfer],
        fence: Fence,
        outage: Outage,
        counters: Counters,
        max_queued_blocks: int,
        event_timeout_s: float,
        stored: StoredKeys | None = None,
    ) -> None:
        """`transfers`: by shard of this rank. `stored` is told what is in the pool, where somebody wants to know."""
        self._transfers = transfers
        self._fence = fence
        self._outage = outage
        self._counters = counters
        self._max_queued_blocks = max_queued_blocks
        self._event_timeout_s = event_timeout_s
        self._stored = stored
        self._num_queued = 0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvpool-saver", daemon=True)
        self._thread.start()

    def submit(self, saves: Sequence[ShardBlocks], event: Event) -> None:
        """Queue blocks whose bytes are there once `event` has happened."""
        num_blocks = sum(len(save.block_ids) for save in saves)
        if not num_blocks:
            return
        with self._lock:
            fits = self._num_queued + num_blocks <= self._max_queued_blocks
            if fits:
                self._num_queued += num_blocks
        if not fits:
            self._counters.add("save_blocks_dropped_queue_full", num_blocks)
            end_spans(saves)
            return
        self._counters.add("save_queue_entered", num_blocks)
        # One each: of a block that is in several objects (shards, or of two requests), what one need not read any more
        # the others still do.
        tickets = [self._fence.ticket(save.block_ids) for save in saves]
        self._jobs.put(_Job(event, saves, tickets, num_blocks))

    def soon(self, call: Callable[[], None]) -> None:
        """Call something of the store's in the thread, behind the jobs that are queued."""
        self._jobs.put(call)

    def drain(self, timeout_s: float) -> bool:
        """True once all that was submitted has ended; False when that took longer than `timeout_s` seconds."""
        return self._fence.drain(timeout_s)

    def close(self) -> bool:
        """End the thread after the job it is in; True when it has ended within the transport's limits."""
        self._jobs.put(None)
        self._thread.join(timeout=60)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, _Job):
                try:
                    job()
                except Exception:
                    # The thread must live on: all later saves are its.
                    logger.exception("event=save_failed blocks=0")
                continue
            try:
                self._save(job)
            except Exception:
                # The thread must outlive one bad job; the blocks of the job are simply not stored.
                logger.exception("event=save_failed blocks=%d", job.num_blocks)
                self._counters.add("save_blocks_failed", job.num_blocks)
            finally:
                for ticket in job.tickets:
                    ticket.close()
                with self._lock:
                    self._num_queued -= job.num_blocks
                self._counters.add("save_queue_left", job.num_blocks)
                end_spans(job.saves)

    def _save(self, job: _Job) -> None:
        if self._outage.active:
            self._counters.add("save_blocks_dropped_outage", job.num_blocks)
            return
        if not job.event.wait(self._event_timeout_s):
            logger.error("event=device_late limit_s=%g blocks=%d: not stored", self._event_timeout_s, job.num_blocks)
            self._counters.add("save_blocks_dropped_device_late", job.num_blocks)
            return
        for save, ticket in zip(job.saves, job.tickets, strict=True):
            transfer = self._transfers[save.shard]
            statuses = transfer.save(save.keys, save.block_ids, ticket)
            if self._stored is not None:
                self._stored.note(save.keys, statuses)
            if save.span is not None:
                save.span.count(statuses)
            count_saved(statuses, transfer.stored_bytes, self._outage, self._counters)


def end_spans(saves: Iterable[ShardBlocks]) -> None:
    """Nothing more of these saves will happen."""
    for save in saves:
        if save.span is not None:
            save.span.end()


def count_saved(statuses: Sequence[Status], stored_bytes: int, outage: Outage, counters: Counters) -> None:
    """Enter how saves of blocks, of `stored_bytes` each, ended into the counts and the memory of outages."""
    outage.note(statuses)
    counts = Counter(statuses)
    counters.add("save_bytes", counts[Status.OK] * stored_bytes)
    counters.add("save_blocks_stored", counts.pop(Status.OK, 0))
    counters.add("save_blocks_present", counts.pop(Status.EXISTS, 0))
    counters.add("save_blocks_dropped_device_late", counts.pop(Status.DEVICE_LATE, 0))
    for status, count in counts.items():
        counters.add(f"save_blocks_{status.value}", count)
    if counts:
        logger.info("event=save_incomplete %s", " ".join(f"{s.value}={n}" for s, n in counts.items()))
