"""Both stores full, driven by the same operations at random.

What goes when space is short depends on when the real master's thread wakes up, so the two may hold different objects.
Each must be legal: bytes are a key's own, what has a lease stays, what was never stored is not there, and space is free
again. Needs real Mooncake. `KVPOOL_SEQUENCES / 5` sequences of 40 steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvpool_conformance.plugin import MARK
from kvpool_simulator.store.codes import NO_AVAILABLE_HANDLE, OBJECT_HAS_LEASE, OBJECT_NOT_FOUND
from kvpool_simulator.store.master import Master
from tests.twin.test_side_by_side import SEQUENCES, asked_for, compare
from tests.twin.world import LEASE_S, SEGMENT_BYTES, World, get, put, real_world, simulated_world

MIB = 1 << 20
NUM_NAMES = 30
WATERMARK = 0.90
GAP_S = 0.03
"""Some rounds of eviction."""
SURE_S = 0.7 * LEASE_S
"""A lease that is younger than this runs, however slow the machine is."""
numbers = st.integers(0, NUM_NAMES - 1)


def value_of(number: int) -> bytes:
    """1 to 4 MiB that belong to a name."""
    return hashlib.sha256(bytes([number])).digest() * ((1 + number % 4) * MIB // 32)


class View:
    """What one world may hold."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stored: set[int] = set()
        self.leases: dict[int, float] = {}
        """When each began."""

    def leased(self) -> set[int]:
        """Objects with a lease that surely runs."""
        now = self.world.now()
        return {number for number, start in self.leases.items() if now - start < SURE_S}


def machine(views: list[View]) -> type[RuleBasedStateMachine]:
    """A state machine over full stores."""

    class FullStore(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            self.stem = views[0].world.key()
            for view in views:
                view.stored, view.leases = set(), {}
            self.fill(range(0, NUM_NAMES, 2))

        def name(self, number: int) -> str:
            return f"{self.stem}-{number}"

        def each(self, act: Callable[[View], None]) -> None:
            for view in views:
                act(view)
                self.judge(view)

        def judge(self, view: View) -> None:
            leased = view.leased()
            keys = {int(key.rpartition("-")[2]) for key in view.world.readable_keys() if key.startswith(self.stem)}
            if view.leased() == leased:
                assert not leased - keys, f"{view.world.name}: evicted under a lease: {leased - keys}"
            assert keys <= view.stored, f"{view.world.name}: never stored: {keys - view.stored}"
            assert view.world.used_bytes() <= SEGMENT_BYTES

        @rule(some=st.lists(numbers, min_size=1, max_size=6, unique=True))
        def fill(self, some: Any) -> None:
            def act(view: View) -> None:
                for number in some:
                    code = put(view.world.a, self.name(number), value_of(number))  # type: ignore[attr-defined]
                    assert code in (0, NO_AVAILABLE_HANDLE), f"{view.world.name}: put returned {code}"
                    if code == 0:
                        view.stored.add(number)
                    view.world.advance(GAP_S)

            self.each(act)

        @rule(some=st.lists(numbers, min_size=1, max_size=8, unique=True))
        def exist(self, some: list[int]) -> None:
            def act(view: View) -> None:
                start = view.world.now()
                codes = view.world.b.batch_is_exist([self.name(n) for n in some])  # type: ignore[attr-defined]
                assert set(codes) <= {0, 1}
                view.leases.update({number: start for number, code in zip(some, codes, strict=True) if code})

            self.each(act)

        @rule(number=numbers)
        def read(self, number: int) -> None:
            def act(view: View) -> None:
                value, start, must = value_of(number), view.world.now(), number in view.leased()
                code, found = get(view.world.b, self.name(number), len(value))  # type: ignore[attr-defined]
                assert code == len(value) or (code == OBJECT_NOT_FOUND and not must), f"{view.world.name}: {code}"
                if code > 0:
                    assert found == value, f"{view.world.name}: foreign bytes under {number}"
                    view.leases[number] = start

            self.each(act)

        @rule(number=numbers)
        def remove(self, number: int) -> None:
            def act(view: View) -> None:
                must = number in view.leased()
                code = view.world.a.remove(self.name(number), False)  # type: ignore[attr-defined]
                allowed = (OBJECT_HAS_LEASE,) if must else (0, OBJECT_HAS_LEASE, OBJECT_NOT_FOUND)
                assert code in allowed, f"{view.world.name}: remove returned {code}, expected one of {allowed}"
                if code == 0:
                    view.stored.discard(number)

            self.each(act)

        @rule()
        def rest(self) -> None:
            """With no lease left there is room again, and what just fits can be put."""

            def act(view: View) -> None:
                view.world.advance(LEASE_S * 1.2)
                view.leases.clear()
                assert view.world.used_bytes() <= WATERMARK * SEGMENT_BYTES, view.world.name

            self.each(act)

        def teardown(self) -> None:
            for view in views:
                view.world.a.batch_remove([self.name(n) for n in range(NUM_NAMES)], True)  # type: ignore[attr-defined]
                view.world.advance(GAP_S)

    return FullStore


@pytest.fixture(scope="module")
def views() -> Any:
    """Both worlds with 64 MiB, for up to 74 MiB of objects."""
    assert sum(len(value_of(number)) for number in range(NUM_NAMES)) > 1.1 * SEGMENT_BYTES
    with ExitStack() as stack:
        pair = [stack.enter_context(simulated_world()), stack.enter_context(real_world())]
        for world in pair:
            world.client(SEGMENT_BYTES)
            world.a, world.b = world.client(), world.client()  # type: ignore[attr-defined]
        yield [View(world) for world in pair]


@getattr(pytest.mark, MARK)("mooncake")
@pytest.mark.timeout(7200)
def test_both_are_legal_when_full(request: pytest.FixtureRequest) -> None:
    asked_for(request)
    compare(machine, request.getfixturevalue("views"), max(2, SEQUENCES // 5))


@getattr(pytest.mark, MARK)("mooncake")
def test_an_eviction_that_ignores_leases_is_found(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for(request)
    views = request.getfixturevalue("views")
    monkeypatch.setattr(Master, "_grant", lambda self, found: None)
    script: Any = machine(views)()
    script.begin()
    try:
        script.fill(range(1, 16, 2))
        script.exist(list(range(NUM_NAMES)))
        with pytest.raises(AssertionError, match="simulator: evicted under a lease"):
            script.fill((17, 19, 21))
    finally:
        script.teardown()
