"""A real vLLM engine in a process of its own: fresh each time, and unable to take the tests with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.engine.serving import Answer, State, serve
from tests.engine.spec import BASE_ENVIRONMENT, EngineSpec

START_LIMIT_S = 180.0
ANSWER_LIMIT_S = 120.0
REST_ATTEMPTS = 3
PRELOADED = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "kvpool_connector.vllm"]


class EngineError(RuntimeError):
    """The engine could not start or failed; carries what the other process said."""


class Engine:
    """A running engine."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start it. Raises `EngineError` when it does not start within the limit."""
        self.spec = spec
        self._connection, other = multiprocessing.Pipe()
        self._log = Path(tempfile.mkstemp(prefix="kvpool-engine-", suffix=".log")[1])
        # Engines are forked from a process that has imported vLLM and done nothing else: the import takes three
        # quarters of an engine's start.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._process = context.Process(target=serve, args=(other, spec, str(self._log)))
        with environment(BASE_ENVIRONMENT):
            self._process.start()
        other.close()
        try:
            self._answer("start", START_LIMIT_S)
        except EngineError:
            self.kill()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **sampling: Any) -> list[Answer]:
        """Greedy tokens for each prompt of token ids."""
        self.ask(prompts, max_tokens, **sampling)
        return self.answers()

    def ask(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, salt: str | None = None, **sampling: Any
    ) -> None:
        """`generate` whose `answers` are fetched later. Requests with different salts share no blocks."""
        self._send("generate", prompts, salt, {"max_tokens": max_tokens, **sampling})

    def answers(self) -> list[Answer]:
        """What was asked for last."""
        answers: list[Answer] = self._answer("generate", ANSWER_LIMIT_S)
        return answers

    def counts(self) -> dict[str, int]:
        """What the connector has counted so far, by name: over all ranks, and both sides."""
        self._send("counts")
        counts: dict[str, int] = self._answer("count", ANSWER_LIMIT_S)
        return counts

    def forget(self) -> None:
        """Empty the engine's own prefix cache, with all saves ended; the pool stays."""
        if self.spec.pool is not None and self.spec.in_process:
            self.perform("drain")
        self._send("forget")
        self._answer("forget", ANSWER_LIMIT_S)

    def reset(self) -> None:
        """Empty the engine's own prefix cache and the pool, as a user does after new weights."""
        self._send("reset")
        self._answer("reset", ANSWER_LIMIT_S)

    def perform(self, name: str, *arguments: Any) -> Any:
        """What a function returns, of `tests.engine.inside` or named `module:function`.

        For engines whose core has no process of its own.
        """
        self._send("perform", name if ":" in name else f"tests.engine.inside:{name}", arguments)
        return self._answer(name, ANSWER_LIMIT_S)

    @contextmanager
    def fault(self, name: str, *arguments: object) -> Iterator[None]:
        """A fault of `tests.engine.faults` for a while."""
        self._call(":".join((name, *map(str, arguments))))
        try:
            yield
        finally:
            self._call("heal")

    def _call(self, name: str) -> None:
        self._send("call", f"tests.engine.faults:{name}")
        self._answer(name, ANSWER_LIMIT_S)

    def assert_at_rest(self) -> None:
        """Nothing is held and nothing remembered of any request, and no count is negative."""
        for _ in range(REST_ATTEMPTS):
            self.perform("drain")
            # What is freed when a transfer ends is freed by the next step; and a step there is only with a request.
            self.generate([[1, 2, 3]], max_tokens=2)
            held: State = self.perform("state")
            if held == State(0, 0, 0, 0):
                break
        assert held == State(0, 0, 0, 0)
        self.counts()

    def _send(self, name: str, *arguments: Any) -> None:
        with suppress(BrokenPipeError):
            # The answer says how it ended.
            self._connection.send((name, arguments))

    def _answer(self, what: str, limit_s: float) -> Any:
        if not self._connection.poll(limit_s):
            raise EngineError(f"the engine did not {what} within {limit_s:g} s; it printed:\n{self.printed()}")
        try:
            done, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(10)
            raise EngineError(
                f"the engine ended with {self._process.exitcode} instead of: {what}; it printed:\n{self.printed()}"
            ) from error
        if not done:
            raise EngineError(value)
        return value

    def printed(self) -> str:
        """The end of what the engine's process has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def close(self) -> None:
        """Shut down as a user would, which stores what is queued."""
        self._connection.send(None)
        self._answer("shut down", 60)
        self._process.join(30)
        self.kill()

    def kill(self) -> None:
        """End the process and its children."""
        if self._process.is_alive():
            assert self._process.pid is not None
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # It may not have had time to make its group.
            self._process.kill()
        self._process.join(10)
        self._connection.close()
        self._log.unlink(missing_ok=True)


@contextmanager
def engine(spec: EngineSpec) -> Iterator[Engine]:
    """A running engine, shut down at the end."""
    running = Engine(spec)
    try:
        yield running
        if spec.in_process:
            running.assert_at_rest()
        running.close()
    finally:
        running.kill()


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
