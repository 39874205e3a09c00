"""The process that an engine runs in: it does what it is asked through a pipe until it is told to end."""

from __future__ import annotations

import importlib
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.engine.spec import EngineSpec


@dataclass(frozen=True)
class Answer:
    """What an engine answered to one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token. They show any wrong byte of the context, where a token may happen to stay the same."""
    num_cached_tokens: int
    """Of the prompt, from the pool and the local cache together."""
    first_token_s: float

    @classmethod
    def of(cls, output: Any) -> Answer:
        """From a finished `RequestOutput` with logprobs."""
        (completion,) = output.outputs
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        return cls(
            tuple(completion.token_ids),
            tuple(of[token].logprob for token, of in pairs),
            output.num_cached_tokens or 0,
            output.metrics.first_token_latency,
        )


@dataclass(frozen=True)
class State:
    """What an engine still holds; all of it 0 when it has nothing to do."""

    usage: float
    """Share of the KV cache that requests hold."""
    num_requests: int
    num_tracked: int
    """Requests of which the connector's scheduler side remembers anything."""
    num_saving: int
    """Saves that the connector's worker side has not ended."""


class Serving:
    """An engine and what can be asked of it."""

    def __init__(self, spec: EngineSpec) -> None:
        for patch in spec.patches:
            call(patch)
        from vllm import LLM

        self._engine = LLM(**spec.engine_arguments())
        self._counts: Counter[str] = Counter()
        self._negative: dict[str, float] = {}
        manager = self._engine.llm_engine.logger_manager
        manager.record = self._listen(manager.record)

    def _listen(self, record: Callable[..., None]) -> Callable[..., None]:
        """Between the engine and its loggers: all counts come by here, the connector's from all ranks and sides."""

        def recording(*, scheduler_stats: Any, iteration_stats: Any, **others: Any) -> None:
            for name, number in numbers(scheduler_stats.kv_connector_stats or {}):
                self._counts[name] += int(number)
            if iteration_stats is not None:
                self._counts["preemptions"] += iteration_stats.num_preempted_reqs
            for stats in (scheduler_stats, iteration_stats):
                self._negative.update({name: number for name, number in numbers(stats) if number < 0})
            record(scheduler_stats=scheduler_stats, iteration_stats=iteration_stats, **others)

        return recording

    def generate(self, prompts: Sequence[Sequence[int]], salt: str | None, sampling: dict[str, Any]) -> list[Answer]:
        """Greedy tokens for each prompt of token ids."""
        from vllm import SamplingParams

        salted = {} if salt is None else {"cache_salt": salt}
        outputs = self._engine.generate(
            [{"prompt_token_ids": list(prompt), **salted} for prompt in prompts],
            SamplingParams(temperature=0, ignore_eos=True, logprobs=0, **sampling),
            use_tqdm=False,
        )
        return [Answer.of(output) for output in outputs]

    def counts(self) -> dict[str, int]:
        """What the connector has counted so far by name, and the engine's preemptions. No count was ever negative."""
        assert not self._negative, f"negative counts: {self._negative}"
        return dict(self._counts)

    def forget(self) -> None:
        """Empty the engine's own prefix cache, with all saves ended; the pool stays."""
        assert self._engine.reset_prefix_cache(), "the engine did not empty its prefix cache"

    def reset(self) -> None:
        """Empty the engine's own prefix cache and the pool."""
        assert self._engine.reset_prefix_cache(reset_connector=True), "the engine did not reset its caches"

    def call(self, name: str) -> None:
        """Call `module:function:argument:...`."""
        call(name)

    def perform(self, name: str, arguments: Sequence[Any]) -> Any:
        """What `module:function` makes of the `vllm.LLMEngine` and the arguments."""
        module, function = name.split(":")
        return getattr(importlib.import_module(module), function)(self._engine.llm_engine, *arguments)

    def shut_down(self) -> None:
        """As a user would."""
        self._engine.llm_engine.engine_core.shutdown()


def call(name: str) -> None:
    """Call `module:function:argument:...`."""
    module, function, *arguments = name.split(":")
    getattr(importlib.import_module(module), function)(*arguments)


def numbers(stats: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in an engine's statistics, by name."""
    if isinstance(stats, bool):
        return
    if isinstance(stats, int | float):
        yield name, stats
    elif isinstance(stats, list | tuple):
        for one in stats:
            yield from numbers(one, name)
    elif isinstance(stats, dict) or hasattr(stats, "__dict__"):
        for key, value in (stats if isinstance(stats, dict) else vars(stats)).items():
            yield from numbers(value, str(key))


def serve(connection: Connection, spec: EngineSpec, log: str) -> None:
    """The engine's process; what it and its libraries print goes to `log`."""
    # A group of its own, so that its children can be ended with it.
    os.setpgrp()
    os.environ.update(spec.environment())
    with open(log, "wb", buffering=0) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    try:
        serving = Serving(spec)
        connection.send((True, None))
        while (request := connection.recv()) is not None:
            name, arguments = request
            connection.send((True, getattr(serving, name)(*arguments)))
        serving.shut_down()
        connection.send((True, None))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise
