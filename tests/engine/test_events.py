"""KV events of the pool, as a router gets them from the engine's own publisher over ZMQ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from tests.engine.conftest import assert_same
from tests.engine.engine import Engine, engine
from tests.engine.prompts import PROMPTS
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec

BLOCK = 32
MAX_STEPS = 200
HELLO = [[1, 2, 3]]


class Router:
    """What an engine has published."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self.events: list[Any] = []

    def listen(self) -> None:
        """Take what has come, waiting a moment for it."""
        from msgspec import msgpack
        from vllm.distributed.kv_events import KVEventBatch

        while self._socket.poll(200):
            _, _, batch = self._socket.recv_multipart()
            self.events += msgpack.decode(batch, type=KVEventBatch).events

    def since_reset(self) -> list[Any]:
        """The events after the last that says that nothing is there any more."""
        names = [type(event).__name__ for event in self.events]
        return self.events[len(names) - [*reversed(names)].index("AllBlocksCleared") :]

    def blocks(self, medium: str) -> dict[Any, Any]:
        """Blocks of a medium that were stored since the last reset, by hash: parent, tokens and size; each once."""
        found: dict[Any, Any] = {}
        for event in self.since_reset():
            if event.medium == medium:
                parent = event.parent_block_hash
                for i, name in enumerate(event.block_hashes):
                    assert name not in found
                    tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                    found[name] = parent, tuple(tokens), event.block_size
                    parent = name
        return found

    def begin(self, one: Engine) -> None:
        """Until the engine has connected; what it stored so far is forgotten."""
        for attempt in range(MAX_STEPS):
            one.generate([[attempt % 250] * 40], max_tokens=2)
            self.listen()
            if self.events:
                break
        self.reset(one)

    def reset(self, one: Engine) -> None:
        """Reset the engine's cache and its pool, and hear of both."""
        self.events.clear()
        one.reset()
        self.wait(one, lambda: [type(event).__name__ for event in self.events].count("AllBlocksCleared") == 2)

    def wait(self, one: Engine, done: Callable[[], bool]) -> None:
        """Until something has come: a step carries what was stored since the last one."""
        for _ in range(MAX_STEPS):
            one.generate(HELLO, max_tokens=2)
            self.listen()
            if done():
                return
        raise AssertionError(f"not within {MAX_STEPS} steps; {len(self.events)} events came: {self.events[-5:]}")


@contextmanager
def router() -> Iterator[tuple[Router, dict[str, Any]]]:
    """A router on loopback, and the engine's arguments that publish to it."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}"}
        yield Router(socket), {"kv_events_config": config}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_router_learns_what_the_pool_has(
    spec: Callable[..., EngineSpec], baseline: Callable[[str], list[Answer]], tp_size: int
) -> None:
    expected = {
        tuple(prompt[start : start + BLOCK])
        for prompt in PROMPTS
        for start in range(0, len(prompt) // BLOCK * BLOCK, BLOCK)
    }
    with router() as (listening, arguments):
        made = spec("gqa", f"events-{tp_size}", arguments=arguments, tensor_parallel_size=tp_size)

        def all_told() -> bool:
            return {tokens for _, tokens, _ in listening.blocks("STORAGE").values()} == expected

        with engine(made) as one:
            listening.begin(one)
            for _ in range(2):
                assert listening.blocks("STORAGE") == {}
                assert_same(one.generate(PROMPTS), baseline("gqa"))
                listening.wait(one, all_told)
                # Block for block what the engine says of its own cache.
                assert listening.blocks("STORAGE") == listening.blocks("GPU")
                listening.reset(one)
