"""Every object in the pool is what its key promises: all are loaded once more and compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool_connector.contract.keys import tag_of
from kvpool_connector.metadata import GroupBlocks, LoadJob, StepMetadata
from kvpool_simulator.engine import Engine, Request
from kvpool_simulator.engine.groups import Group
from kvpool_simulator.engine.oracle import RankMemory, weighed
from tests.cluster.sides import PoolSchedulerSide, PoolWorkerSide


def audit(engines: Sequence[Engine]) -> tuple[list[str], int, int]:
    """Wrong objects, in words, how many were looked at, and how many blocks of prompts were not there."""
    violations: list[str] = []
    count = missing = 0
    for engine in engines:
        blocks = blocks_of(engine)
        for index, rank in enumerate(engine.ranks):
            assert isinstance(rank.side, PoolWorkerSide)
            for number, group in enumerate(engine.scheduler.tables.groups):
                if not any(name in rank.memory.layers for name in group.layer_names):
                    continue
                wanted = [(tag, hash_, what) for (n, tag, hash_), what in blocks.items() if n == number]
                room = engine.scheduler.limits.num_blocks - 1
                for start in range(0, len(wanted), room):
                    some = wanted[start : start + room]
                    failed, wrong = _check(rank.side, rank.memory, number, group, some, *_now(engine))
                    count += len(some) - len(failed)
                    missing += sum(
                        (index + 1) * group.tokens <= request.num_prompt_tokens and not group.state
                        for i in failed
                        for request, index in (some[i - 1][2],)
                    )
                    violations += [f"{engine.name} rank {index}: the pool's object of {text}" for text in wrong]
    return violations[:20], count, missing


Wanted = tuple[str, bytes, tuple[Request, int]]


def blocks_of(engine: Engine) -> dict[tuple[int, str, bytes], tuple[Request, int]]:
    """(group, tag, hash) of every block that may be in the pool, and whose it is."""
    found: dict[tuple[int, str, bytes], tuple[Request, int]] = {}
    tables = engine.scheduler.tables
    for request in engine.scheduler.ended:
        if request.wish.embeds or request.wish.pooling:
            continue
        tag = tag_of(request.wish.extras.lora or None, request.cache_salt)
        for number, group in enumerate(tables.groups):
            per_block = group.tokens // request.truth.hash_block_size
            for index in range(len(request.block_hashes) // per_block):
                found.setdefault((number, tag, request.block_hashes[(index + 1) * per_block - 1]), (request, index))
    return found


def _now(engine: Engine) -> tuple[int, int]:
    """The pool's epoch for this engine, and its weights."""
    side = engine.scheduler.connector
    assert isinstance(side, PoolSchedulerSide) and side.scheduler.epoch is not None
    return side.scheduler.epoch, engine.scheduler.weights


def _check(
    side: PoolWorkerSide,
    memory: RankMemory,
    number: int,
    group: Group,
    wanted: Sequence[Wanted],
    epoch: int,
    weights: int,
) -> tuple[set[int], list[str]]:
    memory.caches.poison()
    ids = list(range(1, len(wanted) + 1))
    jobs = tuple(
        LoadJob(
            f"audit-{tag}",
            (GroupBlocks(number, tuple(b for b, _ in mine), tuple(h for _, h in mine)),),
            tag,
            epoch=epoch,
        )
        for tag in sorted({tag for tag, _, _ in wanted})
        if (mine := [(b, h) for b, (t, h, _) in zip(ids, wanted, strict=True) if t == tag])
    )
    step = StepMetadata(loads=jobs)
    side.worker.begin_step(step)
    side.worker.start_loads(step)
    for name in memory.layers:
        side.worker.wait_layer(name)
    side.worker.end_step(step)
    failed = side.worker.take_failed_blocks()
    side.worker.take_report()
    wrong: list[str] = []
    for block_id, (_, _, (request, index)) in zip(ids, wanted, strict=True):
        if block_id in failed:
            continue
        end = (index + 1) * group.tokens
        start = end - 1 if group.state else index * group.tokens
        request.key_at(end - 1)
        keys = weighed(np.array(request.truth.keys[start:end], np.uint64), weights)
        table = [0] * index + [block_id]
        rows = memory.rows(keys, table, group.tokens, start, state=group.state)
        for name in group.layer_names:
            for component in memory.layers.get(name, []):
                differs = component.wrong(rows.block_ids, rows.rows_at, component.expected(rows.keys))
                if differs.any():
                    wrong.append(
                        f"{request.request_id}, block {index}, group {number}, {name} {component.name}: "
                        f"{int(differs.sum())} of {len(differs)} tokens are wrong"
                    )
                    break
            else:
                continue
            break
    return failed & set(ids), wrong
