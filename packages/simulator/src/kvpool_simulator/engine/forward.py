"""A step's work on the device: every layer writes the new tokens' KV and reads, byte by byte, all that they see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpool_simulator.device.arena import Bytes
from kvpool_simulator.engine.groups import Group
from kvpool_simulator.engine.oracle import Component, RankMemory, Rows, weighed
from kvpool_simulator.engine.scheduler import Part, Step

GARBAGE = 0x3C
"""What comes of wrong bytes is wrong in every byte."""


@dataclass
class _Plan:
    """Rows of all requests of a step, as the ranks at one context-parallel position hold one group."""

    new: Rows
    seen: Rows
    new_owner: NDArray[np.int64]
    """By row: index of the request in the step."""
    seen_owner: NDArray[np.int64]


class Forward:
    """One step's forward pass over all ranks, in lockstep, as collectives keep them."""

    def __init__(self, step: Step, groups: Sequence[Group], ranks: Sequence[RankMemory]) -> None:
        self._step = step
        self._groups = groups
        self._ranks = ranks
        self._group_of = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        self._plans: dict[tuple[int, int], _Plan] = {}
        self.num_rows_checked = 0

    def run(self, layer_names: Iterable[str]) -> None:
        """The layers' work, in order, on every rank that has them."""
        for name in layer_names:
            self._layer(name)

    def _layer(self, name: str) -> None:
        number = self._group_of[name]
        # Tokens of one step may see each other; a state is overwritten.
        writes_first = not self._groups[number].state
        holders = [rank for rank in self._ranks if name in rank.layers]
        expected: dict[tuple[object, ...], tuple[Bytes, Bytes]] = {}
        bad = np.array([part.request.request_id in self._step.bad for part in self._step.parts], np.bool_)

        def write() -> None:
            for rank in holders:
                plan = self._plan(number, rank)
                for component in rank.layers[name]:
                    rows, _ = self._expected(expected, component, rank, plan)
                    self._write(component, plan, rows, bad)

        if writes_first:
            write()
        before = bad.copy()
        for rank in holders:
            plan = self._plan(number, rank)
            for component in rank.layers[name]:
                _, rows = self._expected(expected, component, rank, plan)
                wrong = component.wrong(plan.seen.block_ids, plan.seen.rows_at, rows)
                self.num_rows_checked += len(rows)
                if wrong.any():
                    self._note(name, component, plan, rows, wrong, bad)
        if not writes_first or not np.array_equal(bad, before):
            write()

    def _note(
        self,
        name: str,
        component: Component,
        plan: _Plan,
        rows: Bytes,
        wrong: NDArray[np.bool_],
        bad: NDArray[np.bool_],
    ) -> None:
        for index in np.unique(plan.seen_owner[wrong]):
            bad[index] = True
            request_id = self._step.parts[index].request.request_id
            if request_id not in self._step.bad:
                at = int(np.flatnonzero(wrong & (plan.seen_owner == index))[0])
                block_id, row_at = int(plan.seen.block_ids[at]), int(plan.seen.rows_at[at])
                self._step.bad[request_id] = (
                    f"{name} {component.name}, block {block_id}, row {row_at}: "
                    f"{component.describe(block_id, row_at, rows[at])}"
                )

    @staticmethod
    def _write(component: Component, plan: _Plan, rows: Bytes, bad: NDArray[np.bool_]) -> None:
        if len(rows):
            spoilt = bad[plan.new_owner]
            if spoilt.any():
                rows = rows.copy()
                rows[spoilt] ^= np.uint8(GARBAGE)
            component.write(plan.new.block_ids, plan.new.rows_at, rows)

    def _expected(
        self, kept: dict[tuple[object, ...], tuple[Bytes, Bytes]], component: Component, rank: RankMemory, plan: _Plan
    ) -> tuple[Bytes, Bytes]:
        """Rows to write and rows to find; computed once for ranks that hold the same."""
        identity = (*component.identity, rank.cp_position)
        if identity not in kept:
            kept[identity] = component.expected(plan.new.keys), component.expected(plan.seen.keys)
        return kept[identity]

    def _plan(self, number: int, rank: RankMemory) -> _Plan:
        at = (number, rank.cp_position)
        if at not in self._plans:
            group = self._groups[number]
            new = [self._new(part, number, group, rank) for part in self._step.parts]
            seen = [self._seen(part, number, group, rank) for part in self._step.parts]
            self._plans[at] = _plan_of(new, seen)
        return self._plans[at]

    @staticmethod
    def _new(part: Part, number: int, group: Group, rank: RankMemory) -> Rows:
        # Of states the last token's alone is left.
        first = len(part.keys) - 1 if group.state else 0
        keys = weighed(np.array(part.keys[first:], np.uint64), part.weights)
        return rank.rows(keys, part.tables[number], group.tokens, part.start + first, state=group.state)

    @staticmethod
    def _seen(part: Part, number: int, group: Group, rank: RankMemory) -> Rows:
        first = group.num_skipped(part.start)
        part.request.key_at(max(0, part.start - 1))
        keys = weighed(np.array(part.request.truth.keys[first : part.start], np.uint64), part.weights)
        return rank.rows(keys, part.tables[number], group.tokens, first, state=group.state)


def _join(rows: Sequence[Rows]) -> tuple[Rows, NDArray[np.int64]]:
    owner = np.repeat(np.arange(len(rows)), [len(some.keys) for some in rows])
    joined = Rows(
        np.concatenate([some.keys for some in rows]),
        np.concatenate([some.block_ids for some in rows]),
        np.concatenate([some.rows_at for some in rows]),
    )
    return joined, owner


def _plan_of(new: Sequence[Rows], seen: Sequence[Rows]) -> _Plan:
    (new_rows, new_owner), (seen_rows, seen_owner) = _join(new), _join(seen)
    return _Plan(new_rows, seen_rows, new_owner, seen_owner)
