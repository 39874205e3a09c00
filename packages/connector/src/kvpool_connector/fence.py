"""Keeps a block's bytes and its key together: no save reads a block after it was given to somebody else.

A queued save holds a `Ticket`. Right before it reads blocks it claims them, and releases them when it has read them.
Before a step overwrites blocks it calls `Fence.overwrite`, which waits for the readers and withdraws what was not
claimed in time. So preemption, finish, abort and window eviction need no rule of their own: reuse is what counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence


class Ticket:
    """A save's right to read blocks; a `kvpool_connector.transfer.Hold`."""

    def __init__(self, fence: Fence, block_ids: Iterable[int], num_reads: int = 1) -> None:
        """`num_reads`: how often each block is claimed, for example once a layer; at once or in turn."""
        self._fence = fence
        self.waiting = set(block_ids)
        """Blocks that may still be claimed."""
        self.reading: set[int] = set()
        """Blocks that are being read now."""
        self._left = dict.fromkeys(self.waiting, num_reads)
        self._readers: Counter[int] = Counter()

    def claim(self, block_ids: Sequence[int]) -> list[bool]:
        """For each block whether it may be read. Withdrawn blocks may not."""
        with self._fence.changed:
            granted = [block_id in self.waiting for block_id in block_ids]
            for block_id in (block_id for block_id, leave in zip(block_ids, granted, strict=True) if leave):
                self._left[block_id] -= 1
                if not self._left[block_id]:
                    self.waiting.discard(block_id)
                self._readers[block_id] += 1
                self.reading.add(block_id)
            return granted

    def release(self, block_ids: Sequence[int]) -> None:
        """The blocks have been read as often as they were claimed; what was not claimed need not be read any more."""
        if not block_ids:
            return
        with self._fence.changed:
            for block_id in block_ids:
                if not self._readers[block_id]:
                    self.waiting.discard(block_id)
                    continue
                self._readers[block_id] -= 1
                if not self._readers[block_id]:
                    self.reading.discard(block_id)
            self._fence.changed.notify_all()

    def drop(self, block_ids: Sequence[int]) -> None:
        """The blocks need not be read any more, however many claims are left."""
        with self._fence.changed:
            self.waiting.difference_update(block_ids)
            self._fence.changed.notify_all()

    def close(self) -> None:
        """The save has ended, however."""
        with self._fence.changed:
            self.waiting.clear()
            self.reading.clear()
            self._fence.tickets.discard(self)
            self._fence.changed.notify_all()


class Fence:
    """All saves under way and the blocks they still need."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long a step may wait for saves that have not begun to read."""
        self._timeout_s = timeout_s
        self.changed = threading.Condition()
        self.tickets: set[Ticket] = set()

    def ticket(self, block_ids: Iterable[int], num_reads: int = 1) -> Ticket:
        """Open a save that reads each of `block_ids` `num_reads` times."""
        ticket = Ticket(self, block_ids, num_reads)
        with self.changed:
            self.tickets.add(ticket)
        return ticket

    def overwrite(self, block_ids: frozenset[int]) -> int:
        """Return when no save needs the old content of `block_ids`; the number of blocks withdrawn from saves.

        Waits at most `timeout_s` for saves that have not begun. A save that is reading is waited for: it ends within
        the device's limit for a copy (packed) or the transport's limit (direct).
        """
        if not block_ids:
            return 0
        with self.changed:
            self.changed.wait_for(lambda: not self._needed(block_ids, "waiting"), self._timeout_s)
            withdrawn: Counter[int] = Counter()
            for ticket in self.tickets:
                withdrawn.update(ticket.waiting & block_ids)
                ticket.waiting -= block_ids
            self.changed.wait_for(lambda: not self._needed(block_ids, "reading"))
        return withdrawn.total()

    def drain(self, timeout_s: float) -> bool:
        """True once no save is under way; False when that took longer than `timeout_s` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.tickets, timeout_s)

    def _needed(self, block_ids: frozenset[int], state: str) -> bool:
        return any(not block_ids.isdisjoint(getattr(ticket, state)) for ticket in self.tickets)
