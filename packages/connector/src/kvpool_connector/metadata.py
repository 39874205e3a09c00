"""What the scheduler side tells the workers each step. Plain data: it crosses processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool_connector.tracing import Headers


@dataclass(frozen=True)
class GroupBlocks:
    """Blocks of one KV cache group: `block_ids[i]` holds (or shall hold) the content of `block_hashes[i]`."""

    group: int
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class LoadJob:
    """Blocks of a request to fill from the pool."""

    request_id: str
    blocks: tuple[GroupBlocks, ...]
    tag: str = ""
    """Key tag of the request's adapter and salt (`kvpool_connector.contract.keys.tag_of`)."""
    between_steps: bool = False
    """True when the request waits outside the running batch; False when this step computes on the blocks."""
    epoch: int = 0
    trace_headers: Headers = ()


@dataclass(frozen=True)
class SaveJob:
    """Full blocks of a request that this step's end leaves complete."""

    request_id: str
    blocks: tuple[GroupBlocks, ...]
    tag: str = ""
    final: bool = False
    """True when the request has ended and its blocks wait for this job: it must let go of them within this step."""
    epoch: int = 0
    """The one in which the request began to compute, or to load, what is saved."""
    trace_headers: Headers = ()


@dataclass(frozen=True)
class LoadReport:
    """What a worker, or all of them together, tell the scheduler side of loads that have ended, and of saves."""

    loaded: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    """Keys of objects that were stored; only where the engine publishes KV events, as `present`."""
    present: frozenset[str] = frozenset()
    """Keys of objects that were to be stored and were there."""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """How long loads that did not fail took, on the slowest rank; only of those that no computing overlapped."""
    step: int = field(default=0, compare=False)
    """`StepMetadata.number` of the step that has ended."""

    def merge(self, other: LoadReport) -> LoadReport:
        """A load failed when it failed anywhere."""
        failed = self.failed | other.failed
        seconds = dict(self.seconds)
        for request_id, taken in other.seconds.items():
            seconds[request_id] = max(taken, seconds.get(request_id, 0.0))
        return LoadReport(
            (self.loaded | other.loaded) - failed,
            failed,
            self.stored | other.stored,
            self.present | other.present,
            seconds,
            max(self.step, other.step),
        )


@dataclass(frozen=True)
class StepMetadata:
    """One step's work for every worker."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    overwritten: frozenset[int] = frozenset()
    """Block ids that this step's computing or loading may write: queued saves of their old content end here."""
    number: int = 0
    """Of the step, where the scheduler side measures how long steps take; workers send it back. 0 where it does not."""
