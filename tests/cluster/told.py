"""What engines tell routers of the pool is so."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_connector.contract.shards import ShardMap
from kvpool_connector.events import StoredBlock
from kvpool_simulator.engine import Engine
from kvpool_simulator.store import SimulatedMaster
from tests.cluster.audit import blocks_of
from tests.cluster.sides import PoolSchedulerSide, PoolWorkerSide


class Told:
    """All that was told, held against the master.

    `keeps_all`: nothing ever leaves the pool; `tells_all`: and what two engines stored of a block together is told.
    """

    def __init__(self, master: SimulatedMaster, *, keeps_all: bool, tells_all: bool) -> None:
        self._master = master
        self._keeps_all = keeps_all
        self._tells_all = tells_all
        self._blocks: dict[tuple[int, bytes], StoredBlock] = {}
        self.violations: list[str] = []

    def hear(self, shards: ShardMap, events: Sequence[StoredBlock | None]) -> None:
        """Right after an engine has told it."""
        told = [block for block in events if block is not None]
        self._blocks.update(((block.group, block.block_hash), block) for block in told)
        if told and self._keeps_all:
            objects = self._objects()
            self.violations += [
                f"block {block.block_hash.hex()} of group {block.group} was told before all of it was in the pool"
                for block in told
                if not _whole(shards, block.group, block.block_hash, objects)
            ]

    def judge(self, engines: Sequence[Engine]) -> list[str]:
        """At the end, with all saves ended: nothing of the pool was kept back, and tokens are those of the hash."""
        for engine in engines:
            side = engine.scheduler.connector
            assert isinstance(side, PoolSchedulerSide)
            for rank in engine.ranks:
                assert isinstance(rank.side, PoolWorkerSide)
                if (report := rank.side.worker.take_report()) is not None:
                    side.scheduler.report(report)
            self.hear(side.shards, side.events.take())
        for engine in engines:
            side = engine.scheduler.connector
            assert isinstance(side, PoolSchedulerSide)
            objects = self._objects() if self._keeps_all and self._tells_all else set()
            for (group, _, name), (request, index) in blocks_of(engine).items():
                size = engine.scheduler.tables.groups[group].tokens
                block = self._blocks.get((group, name))
                tokens = tuple(request.truth.tokens[index * size : (index + 1) * size])
                if block is not None and (block.token_ids, block.block_size) != (tokens, size):
                    self.violations.append(f"block {name.hex()} of group {group} was told with other tokens")
                if (
                    block is None
                    and objects
                    and _whole(side.shards, group, name, objects)
                    and not any(_dropped_some_of(other, group, name) for other in engines)
                ):
                    self.violations.append(f"block {name.hex()} of group {group} is in the pool, and nobody told it")
        return self.violations[:20]

    def _objects(self) -> set[str]:
        """Keys in the pool, without what keeps adapters and salts apart: it is in the hash too."""
        known = self._master.service.master.keys()
        return {key.split("+")[0] for key in known}


def _dropped_some_of(engine: Engine, group: int, name: bytes) -> bool:
    """Whether an engine that dropped saves still waits for parts of a block: it does not learn who stored those."""
    side = engine.scheduler.connector
    assert isinstance(side, PoolSchedulerSide)
    workers = [rank.side.worker for rank in engine.ranks if isinstance(rank.side, PoolWorkerSide)]
    dropped = any(count.startswith("save_blocks_dropped_") for worker in workers for count in worker.counters.totals())
    keys = {shard.key(name) for shard in side.shards.shards(group)}
    return dropped and any(keys == {key.split("+")[0] for key in waiting} for waiting in side.events._waiting)


def _whole(shards: ShardMap, group: int, name: bytes, objects: set[str]) -> bool:
    return all(shard.key(name) in objects for shard in shards.shards(group))
