"""One rank's part of the scheduler side's jobs: blocks of its shards, and what their objects are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvpool_connector.contract.shards import RankShards, Shard
from kvpool_connector.metadata import GroupBlocks, LoadJob, SaveJob
from kvpool_connector.tracing import SaveSpan


@dataclass(frozen=True)
class ShardBlocks:
    """Blocks of one of this rank's shards."""

    shard: int
    """Index among the shards that this rank holds."""
    stored_as: Shard
    block_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    tag: str = ""
    span: SaveSpan | None = None
    """Of the whole request's save, where the engine traces."""

    @cached_property
    def keys(self) -> list[str]:
        """Of the blocks' objects. Made when first asked for: not on a step's path, where a thread asks."""
        return self.stored_as.keys(self.block_hashes, self.tag)

    def part(self, blocks: slice) -> ShardBlocks:
        """Some of the blocks."""
        return replace(self, block_ids=self.block_ids[blocks], block_hashes=self.block_hashes[blocks])


class RankPart:
    """This rank's part of jobs."""

    def __init__(self, announced: RankShards) -> None:
        self.writers = announced.writers
        """By group, this rank's place among those that hold the same."""
        self.shards: list[Shard] = []
        """In the order of groups."""
        self._indices: list[range] = []
        """By group, which of `shards` hold it."""
        for group in range(len(announced.descriptors)):
            first = len(self.shards)
            self.shards += announced.shards(group)
            self._indices.append(range(first, len(self.shards)))

    def move(self, epoch: int) -> None:
        """From now on most jobs are of another epoch."""
        self.shards = [replace(shard, epoch=epoch) for shard in self.shards]

    def of_load(self, job: LoadJob) -> list[ShardBlocks]:
        """What this rank fills."""
        return [one for group in job.blocks for one in self._held(job, group, group.block_ids, group.block_hashes)]

    def of_save(self, job: SaveJob) -> list[ShardBlocks]:
        """What this rank stores: of content that several ranks hold, each writes its share."""
        held: list[ShardBlocks] = []
        for group in job.blocks:
            block_ids: Sequence[int] = group.block_ids
            hashes: Sequence[bytes] = group.block_hashes
            writer = self.writers[group.group]
            if writer.count > 1:
                mine = [i for i, block_hash in enumerate(hashes) if writer.writes(block_hash)]
                hashes, block_ids = [hashes[i] for i in mine], [block_ids[i] for i in mine]
            if hashes:
                held += self._held(job, group, block_ids, hashes)
        return held

    def _held(
        self, job: LoadJob | SaveJob, group: GroupBlocks, block_ids: Sequence[int], hashes: Sequence[bytes]
    ) -> list[ShardBlocks]:
        held = []
        for index in self._indices[group.group]:
            shard = self.shards[index]
            if shard.epoch != job.epoch:
                shard = replace(shard, epoch=job.epoch)
            held.append(ShardBlocks(index, shard, block_ids, hashes, job.tag))
        return held
