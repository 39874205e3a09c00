"""What the benchmarks do inside an engine's process; each takes the `vllm.LLMEngine` first."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from tests.engine import faults
from tests.engine.inside import scheduler_of, sides

STILL_S = 0.05
"""Other threads that use no processor for this long have nothing to do."""
STILL_LIMIT_S = 20.0
_numbers = itertools.count()


class NoEvent:
    """In place of `torch.cuda.Event`, of which a torch without CUDA has only a dummy: a CPU is never behind."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None:
        """What was computed is there already."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """It has happened."""
        return True


def cpu_events() -> None:
    """Let a connector that was written for CUDA run on a CPU."""
    import torch

    # A class of its own where torch declares another: nothing that is asked of it here differs.
    torch.cuda.Event = NoEvent  # type: ignore[misc, assignment]


class Hooks:
    """Seconds inside the connector's hooks of both sides while a context is open."""

    def __init__(self, engine: Any) -> None:
        self._connectors = [one for one in sides(engine) if one is not None]
        self._depth = 0
        self.wall_s = self.cpu_s = 0.0
        self.by_name: defaultdict[str, float] = defaultdict(float)
        """Seconds of the clock, by hook."""

    def __enter__(self) -> Hooks:
        for connector in self._connectors:
            for name in dir(type(connector)):
                if not name.startswith("_") and callable(getattr(type(connector), name)):
                    setattr(connector, name, self._timed(name, getattr(connector, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for connector in self._connectors:
            for name in dir(type(connector)):
                connector.__dict__.pop(name, None)

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            cpu = time.thread_time()
            # Nothing but the hook lies between these two: a step calls dozens of hooks that do next to nothing.
            began = time.perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                taken = time.perf_counter() - began
                self._depth -= 1
                # A hook may call another.
                if not self._depth:
                    self.by_name[name] += taken
                    self.wall_s += taken
                    self.cpu_s += time.thread_time() - cpu

        return call


def others_s() -> float:
    """Seconds of the processor of all threads but this one."""
    return time.process_time() - time.thread_time()


def settle() -> None:
    """Return when the other threads have come to rest."""
    deadline = time.perf_counter() + STILL_LIMIT_S
    before = others_s()
    while True:
        time.sleep(STILL_S)
        now = others_s()
        if now - before < STILL_S / 20:
            return
        assert time.perf_counter() < deadline, f"other threads still work after {STILL_LIMIT_S:g} s"
        before = now


def run(engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> tuple[list[float], list[int]]:
    """Seconds to the first token of each prompt, asked at once, and how many of its tokens were not computed."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    names = [f"bench{next(_numbers)}" for _ in prompts]
    began = time.perf_counter()
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
    first: dict[str, float] = {}
    cached: dict[str, int] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs and output.outputs[0].token_ids:
                first.setdefault(output.request_id, time.perf_counter() - began)
            cached[output.request_id] = output.num_cached_tokens or 0
        if not scheduler_of(engine).running:
            # As the engine's core does in a process of its own: transfer threads need the Python lock too.
            time.sleep(0.001)
    return [first[name] for name in names], [cached[name] for name in names]


def forget(engine: Any) -> None:
    """Empty the engine's own prefix cache, once its saves have ended."""
    settle()
    for _ in range(20):
        # What ended saves free is freed by a step.
        run(engine, [[1, 2, 3]])
        if engine.reset_prefix_cache():
            return
        time.sleep(0.05)
    raise AssertionError("the engine did not empty its prefix cache")


def idle(engine: Any, seconds: float = 2.0) -> float:
    """Share of a core that threads use while nothing is asked: clients of the store and their pings."""
    settle()
    before = others_s()
    time.sleep(seconds)
    return (others_s() - before) / seconds


def measured(engine: Any, prompt: Sequence[int]) -> dict[str, Any]:
    """One prompt, from its arrival to the rest of all threads."""
    began, others = time.perf_counter(), others_s()
    with Hooks(engine) as hooks:
        (first,), (cached,) = run(engine, [prompt])
    settle()
    return {
        "first_token_s": first,
        "cached": cached,
        "hooks_wall_s": hooks.wall_s,
        "by_name": dict(hooks.by_name),
        "cpu_s": hooks.cpu_s + others_s() - others,
        "elapsed_s": time.perf_counter() - began,
    }


def save_and_load(engine: Any, prompt: Sequence[int]) -> dict[str, dict[str, Any]]:
    """A prompt that nobody has, saved; and the same with only the pool having it."""
    saving = measured(engine, prompt)
    forget(engine)
    loading = measured(engine, prompt)
    forget(engine)
    return {"save": saving, "load": loading}


def steps(engine: Any, prompts: Sequence[Sequence[int]], num_steps: int, in_hooks: bool = False) -> float:
    """Seconds of `num_steps` decoding steps of all prompts together, or those of them in the connector's hooks."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_steps + 50)
    names = [f"bench{next(_numbers)}" for _ in prompts]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
    while any(not request.num_output_tokens for request in scheduler_of(engine).requests.values()):
        engine.step()
    settle()
    for _ in range(5):
        engine.step()
    with Hooks(engine) if in_hooks else nullcontext() as hooks:
        began = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        taken = time.perf_counter() - began
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return hooks.wall_s if hooks else taken


def again(engine: Any, prompt: Sequence[int], count: int) -> float:
    """Seconds to the first token of a prompt that the engine has itself, `count` times one after the other."""
    run(engine, [prompt])
    settle()
    found = [run(engine, [prompt]) for _ in range(count)]
    assert all(cached[0] > 0 for _, cached in found), "the engine did not have the prompt itself"
    return sum(first[0] for first, _ in found)


def calls_again(engine: Any, prompt: Sequence[int], count: int) -> int:
    """Calls to the store that the same takes."""
    run(engine, [prompt])
    settle()
    faults.count_calls()
    try:
        again(engine, prompt, count)
        return faults.num_calls(engine)
    finally:
        faults.heal()


def save(engine: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Bring prompts to the pool, and forget them."""
    run(engine, prompts)
    forget(engine)


def ask_each(engine: Any, prompts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Seconds to the first token, summed over prompts one after the other; and how many of their tokens were loaded."""
    # With some decoding steps, as there are when an engine serves.
    found = [run(engine, [prompt], max_tokens=4) for prompt in prompts]
    forget(engine)
    return sum(first[0] for first, _ in found), sum(cached[0] for _, cached in found)
