"""Both stores driven by the same operations at random: every code and every byte is compared after each step.

Needs real Mooncake. `KVPOOL_SEQUENCES` sets the number of sequences of 40 steps: 8 by default, 50 in CI.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvpool_conformance.plugin import MARK
from kvpool_simulator.store.master import Master
from tests.twin.world import LEASE_S, SEGMENT_BYTES, Memory, World, holding, real_world, simulated_world

SEQUENCES = int(os.environ.get("KVPOOL_SEQUENCES", "8"))
clients = st.sampled_from(["a", "b"])
NAMES = 4


@pytest.fixture(scope="module")
def worlds() -> Any:
    """The simulated world and the real one, each with memory and two clients."""
    with ExitStack() as stack:
        pair = [stack.enter_context(simulated_world()), stack.enter_context(real_world())]
        for world in pair:
            world.client(SEGMENT_BYTES)
            world.a, world.b = world.client(), world.client()  # type: ignore[attr-defined]
        yield pair


def machine(worlds: list[World]) -> type[RuleBasedStateMachine]:
    """A state machine over two worlds."""

    class SideBySide(RuleBasedStateMachine):
        keys = Bundle("keys")

        @initialize(target=keys)
        def begin(self) -> Any:
            self.stem = worlds[0].key()
            self.opened: set[tuple[str, str]] = set()
            return f"{self.stem}-0"

        def both(self, act: Any) -> Any:
            """Do it in both worlds; the results must be equal."""
            found = [act(world) for world in worlds]
            assert found[0] == found[1], f"simulator {found[0]!r}, mooncake {found[1]!r}"
            return found[0]

        @rule(target=keys, number=st.integers(1, NAMES))
        def name(self, number: int) -> str:
            return f"{self.stem}-{number}"

        @rule(client=clients, key=keys, value=st.binary(min_size=1, max_size=64), cut=st.integers(0, 63))
        def put(self, client: str, key: str, value: bytes, cut: int) -> None:
            def act(world: Any) -> Any:
                source = holding(value)
                at = min(cut, len(value))
                pieces = [[source.address, source.address + at]], [[at, len(value) - at]]
                return getattr(world, client).batch_put_from_multi_buffers([key], *pieces)

            self.both(act)

        @rule(client=clients, some=st.lists(keys, min_size=1, max_size=3), size=st.integers(1, 64))
        def get(self, client: str, some: list[str], size: int) -> None:
            def act(world: Any) -> Any:
                targets = [Memory(size) for _ in some]
                rows = [[t.address] for t in targets], [[size] for _ in some]
                codes = getattr(world, client).batch_get_into_multi_buffers(some, *rows)
                # After a failure the destination is dirty, so its bytes are nobody's promise.
                return [(c, t.value if c >= 0 else b"") for c, t in zip(codes, targets, strict=True)]

            self.both(act)

        @rule(client=clients, key=keys)
        def get_exact(self, client: str, key: str) -> None:
            size = self.both(lambda world: getattr(world, client).get_size(key))
            if size > 0:
                self.get_sized(client, key, size)

        def get_sized(self, client: str, key: str, size: int) -> None:
            def act(world: Any) -> Any:
                target = Memory(size)
                codes = getattr(world, client).batch_get_into_multi_buffers([key], [[target.address]], [[size]])
                return codes, target.value

            self.both(act)

        @rule(client=clients, some=st.lists(keys, max_size=4))
        def exist(self, client: str, some: list[str]) -> None:
            self.both(lambda world: getattr(world, client).batch_is_exist(some))

        @rule(client=clients, some=st.lists(keys, max_size=3), force=st.booleans())
        def remove(self, client: str, some: list[str], force: bool) -> None:
            self.both(lambda world: getattr(world, client).batch_remove(some, force))

        @rule(client=clients, key=keys, size=st.integers(0, 32))
        def session_start(self, client: str, key: str, size: int) -> None:
            self.both(lambda world: getattr(world, client).batch_put_session_start([key], [size]))

        @rule(client=clients, key=keys, offset=st.integers(0, 32), value=st.binary(min_size=1, max_size=32))
        def session_range(self, client: str, key: str, offset: int, value: bytes) -> None:
            def act(world: Any) -> Any:
                source = holding(value)
                rows = [[source.address]], [[len(value)]], [[offset]]
                return getattr(world, client).batch_put_from_multi_buffer_ranges([key], *rows)

            self.both(act)

        @rule(client=clients, key=keys)
        def session_revoke(self, client: str, key: str) -> None:
            self.both(lambda world: getattr(world, client).batch_put_session_revoke([key]))

        @rule(client=clients, key=keys, size=st.integers(1, 32))
        def session_whole(self, client: str, key: str, size: int) -> None:
            """Start, write all, end: what a careful writer does."""

            def act(world: Any) -> Any:
                store, source = getattr(world, client), holding(bytes(range(size)))
                codes = [store.batch_put_session_start([key], [size])]
                if codes[0] == [0]:
                    codes.append(store.batch_put_from_multi_buffer_ranges([key], [[source.address]], [[size]], [[0]]))
                    codes.append(store.batch_put_session_end([key]))
                return codes

            self.both(act)

        @rule(client=clients, key=keys, value=st.binary(min_size=1, max_size=64))
        def upsert(self, client: str, key: str, value: bytes) -> None:
            def act(world: Any) -> Any:
                source = holding(value)
                return getattr(world, client).upsert_from(key, source.address, len(value))

            self.both(act)

        @rule(number=st.integers(1, NAMES), force=st.booleans())
        def remove_by_regex(self, number: int, force: bool) -> None:
            self.both(lambda world: world.a.remove_by_regex(f"^{self.stem}-[1-{number}]$", force))

        @rule(client=clients, some=st.lists(keys, min_size=1, max_size=3, unique=True))
        def get_session_start(self, client: str, some: list[str]) -> None:
            self.both(lambda world: getattr(world, client).batch_get_session_start(some))

        @rule(client=clients, key=keys, offset=st.integers(0, 32), size=st.integers(1, 32))
        def get_session_range(self, client: str, key: str, offset: int, size: int) -> None:
            def act(world: Any) -> Any:
                target = Memory(size)
                rows = [[target.address]], [[size]], [[offset]]
                codes = getattr(world, client).batch_get_into_multi_buffer_ranges([key], *rows)
                return codes, target.value if codes[0] >= 0 else b""

            self.both(act)

        @rule(client=clients, key=keys)
        def get_session_end(self, client: str, key: str) -> None:
            self.both(lambda world: getattr(world, client).batch_get_session_end([key]))

        @rule()
        def leases_end(self) -> None:
            for world in worlds:
                world.advance(LEASE_S * 1.2)

        def teardown(self) -> None:
            for world in worlds:
                for client in (world.a, world.b):  # type: ignore[attr-defined]
                    keys = [f"{self.stem}-{i}" for i in range(NAMES + 1)]
                    client.batch_put_session_revoke(keys)
                    client.batch_get_session_end(keys)
                    client.batch_remove(keys, True)

    return SideBySide


def compare(machine: Callable[[Any], type[RuleBasedStateMachine]], worlds: Any, sequences: int) -> None:
    """Run sequences of 40 steps; the first difference is an error that says how to replay it."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(worlds),
        settings=settings(
            max_examples=sequences,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def asked_for(request: pytest.FixtureRequest) -> None:
    """Skip, counted, unless real Mooncake was asked for."""
    if "mooncake" not in request.config.getoption("--kvpool-target"):
        pytest.skip("not asked for: needs --kvpool-target mooncake")


@getattr(pytest.mark, MARK)("mooncake")
@pytest.mark.timeout(3000)
def test_the_twin_answers_as_the_real_store_does(request: pytest.FixtureRequest) -> None:
    asked_for(request)
    follow_script(machine(request.getfixturevalue("worlds"))())
    compare(machine, request.getfixturevalue("worlds"), SEQUENCES)


@getattr(pytest.mark, MARK)("mooncake")
@pytest.mark.parametrize("mistake", ["no lease for exist", "replaces what exists", "end of a session not visible"])
def test_a_planted_difference_is_found(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    asked_for(request)
    worlds = request.getfixturevalue("worlds")
    right_start = Master.put_start
    plants = {
        "no lease for exist": ("exist", lambda self, keys: [int(self.peek(key).code == 0) for key in keys]),
        "replaces what exists": (
            "put_start",
            lambda self, keys, *rest: (self.remove(keys, True), right_start(self, keys, *rest))[1],
        ),
        "end of a session not visible": ("put_end", lambda self, keys, client: [0] * len(keys)),
    }
    monkeypatch.setattr(Master, *plants[mistake])
    with pytest.raises(AssertionError, match="simulator"):
        follow_script(machine(worlds)())


def follow_script(script: Any) -> None:
    """Rules of the machine that meet each planted mistake: finding it at random would sleep through many leases."""
    script.begin()
    key = script.name(1)
    script.put("a", key, b"first", 2)
    script.put("b", key, b"other", 2)
    script.get_exact("b", key)
    script.session_whole("a", script.name(2), 4)
    script.exist("b", [script.name(2)])
    script.remove("a", [script.name(2)], False)
