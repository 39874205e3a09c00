"""Loads blocks, a few batches at a time, with a limit on how long anybody waits."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from kvpool_connector.contract.clock import Clock
from kvpool_connector.contract.device import Event
from kvpool_connector.contract.status import Status
from kvpool_connector.counters import Counters
from kvpool_connector.outage import Outage
from kvpool_connector.rank_part import ShardBlocks
from kvpool_connector.transfer import Transfer, parts

logger = logging.getLogger(__name__)

BATCHES_IN_FLIGHT = 2
"""One batch is copied to the cache while the next is on the wire."""
BATCH_BLOCKS = 64


class Leave:
    """Leave to write blocks; a `kvpool_connector.transfer.Hold` that can be withdrawn."""

    def __init__(self, deadline: float, clock: Clock, event: Event) -> None:
        """`event`: after it the device writes nothing more into the blocks that was meant for others."""
        self.deadline = deadline
        self._clock = clock
        self._event = event
        self._changed = threading.Condition()
        self._withdrawn = False
        self._writing = 0

    def claim(self, block_ids: Sequence[int]) -> list[bool]:
        """Leave to write the blocks: all or, once withdrawn or when the device is late, none."""
        landed = self._event.wait(max(0.0, self.deadline - self._clock.now()))
        with self._changed:
            if self._withdrawn or not landed or not block_ids:
                return [False] * len(block_ids)
            self._writing += 1
            return [True] * len(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """The blocks have been written."""
        if block_ids:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def withdraw(self) -> None:
        """After this returns nothing of this load is written any more, however late the store answers.

        A batch that is being written is waited for: within the device's limit (packed) or the transport's (direct).
        What the device may write later all the same is ordered by `Device.order_late_copies`.
        """
        with self._changed:
            self._withdrawn = True
            self._changed.wait_for(lambda: not self._writing)


class Load(Leave):
    """A load under way."""

    def __init__(self, request_id: str, deadline: float, clock: Clock, event: Event) -> None:
        super().__init__(deadline, clock, event)
        self.request_id = request_id
        self.batches: list[tuple[Future[list[Status]], Sequence[int]]] = []

    @property
    def done(self) -> bool:
        """True when every batch has ended."""
        return all(future.done() for future, _ in self.batches)

    def failed_blocks(self) -> tuple[list[int], Counter[Status]]:
        """Blocks that do not hold their content, and why, by status. Batches that have not ended timed out."""
        failed: list[int] = []
        reasons: Counter[Status] = Counter()
        for future, block_ids in self.batches:
            statuses = (
                future.result() if future.done() and not future.cancelled() else [Status.TIMEOUT] * len(block_ids)
            )
            if statuses.count(Status.OK) == len(block_ids) == len(statuses):
                continue
            for block_id, status in zip(block_ids, statuses, strict=True):
                if not status.ok:
                    failed.append(block_id)
                    reasons[status] += 1
        return failed, reasons


class Loader:
    """Runs loads on a few threads."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        outage: Outage,
        counters: Counters,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._transfers = transfers
        self._outage = outage
        self._counters = counters
        self._clock = clock
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(BATCHES_IN_FLIGHT, thread_name_prefix="kvpool-loader")

    def start(self, request_id: str, loads: Sequence[ShardBlocks], event: Event) -> Load:
        """Begin to fill blocks; none is written before `event` has happened."""
        load = Load(request_id, self._clock.now() + self._timeout_s, self._clock, event)
        for blocks in loads:
            for part in parts(len(blocks.block_ids), BATCH_BLOCKS):
                batch = blocks.part(part) if len(blocks.block_ids) > BATCH_BLOCKS else blocks
                load.batches.append((self._threads.submit(self._move, load, batch), batch.block_ids))
        return load

    def finish(self, load: Load) -> list[int]:
        """Wait until the load has ended or its time is up; the blocks that do not hold their content."""
        for future, _ in load.batches:
            try:
                future.result(max(0.0, load.deadline - self._clock.now()))
            except (TimeoutError, CancelledError):
                break
        return self.settle(load)

    def settle(self, load: Load) -> list[int]:
        """End a load now: what has not landed has failed and will not land."""
        if not load.done:
            for future, _ in load.batches:
                future.cancel()
            load.withdraw()
        failed, reasons = load.failed_blocks()
        # A store that has not answered in time is as good as down, though its answer may come yet.
        self._outage.note([Status.TIMEOUT] * reasons[Status.TIMEOUT])
        total = sum(len(block_ids) for _, block_ids in load.batches)
        self._counters.add("load_blocks_ok", total - len(failed))
        self._counters.add("load_time_us", round(self.elapsed_s(load) * 1e6))
        for status, count in reasons.items():
            self._counters.add(f"load_blocks_{status.value}", count)
        if failed:
            logger.warning(
                "event=load_failed request=%s blocks=%d of=%d %s: they are computed instead",
                load.request_id,
                len(failed),
                total,
                " ".join(f"{status.value}={count}" for status, count in reasons.items()),
            )
            logger.debug("event=load_failed request=%s block_ids=%s", load.request_id, failed[:16])
        return failed

    def elapsed_s(self, load: Load) -> float:
        """Seconds since the load began."""
        return max(0.0, self._clock.now() - (load.deadline - self._timeout_s))

    def overdue(self, load: Load) -> bool:
        """True when nobody should wait for the load any more."""
        return self._clock.now() >= load.deadline

    def close(self) -> None:
        """Wait for batches under way (the transport bounds them) and end the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _move(self, load: Load, batch: ShardBlocks) -> list[Status]:
        transfer = self._transfers[batch.shard]
        try:
            statuses = transfer.load(batch.keys, batch.block_ids, load)
        except Exception:
            # Whatever breaks here, the request goes on: its blocks count as not loaded and are computed.
            logger.exception("event=load_raised blocks=%d", len(batch.block_ids))
            return [Status.UNAVAILABLE] * len(batch.block_ids)
        self._outage.note(statuses)
        self._counters.add("load_bytes", transfer.stored_bytes * sum(status.ok for status in statuses))
        return statuses
