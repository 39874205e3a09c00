"""What tests do inside an engine's process, step by step; each takes the `vllm.LLMEngine` first.

For engines whose core runs in the same process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvpool_connector.learnt_transfer import LearntTransfer
from tests.engine import faults
from tests.engine.serving import Answer, State

STEP_LIMIT = 5000
STATES = ("waiting", "loading", "prefilling", "decoding")
"""What a request can be in when it is aborted. Loading: with loads between steps only."""


def sides(engine: Any) -> tuple[Any, Any]:
    """The scheduler's connector and the worker's; both None without a connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return scheduler_of(engine).connector, get_kv_transfer_group() if has_kv_transfer_group() else None


def children(connector: Any) -> Sequence[Any]:
    """A connector's parts, or itself; ours alone."""
    return [one for one in getattr(connector, "_connectors", [connector]) if hasattr(one, "_workers")]


def evicts_from_the_engines_cache(engine: Any) -> bool:
    """Whether blocks of failed loads are taken out of this engine's own prefix cache."""
    scheduler = scheduler_of(engine)
    pool = scheduler.kv_cache_manager.block_pool
    return all(one._schedulers()._evict == pool.evict_blocks for one in children(scheduler.connector))


def scheduler_of(engine: Any) -> Any:
    """The engine's scheduler."""
    return engine.engine_core.engine_core.scheduler


def state(engine: Any) -> State:
    """What the engine holds now."""
    scheduler, (above, below) = scheduler_of(engine), sides(engine)
    return State(
        scheduler.kv_cache_manager.usage,
        len(scheduler.requests),
        sum(one._scheduler.num_tracked for one in children(above)),
        sum(len(one._worker._fence.tickets) for one in children(below)),
    )


def drain(engine: Any) -> None:
    """Let all saves end."""
    for one in children(sides(engine)[1]):
        assert one._worker.drain(30), "saves have not ended within 30 s"


def add(engine: Any, name: str, prompt: Sequence[int], max_tokens: int) -> Callable[[], Any]:
    """Add a request; what finds the scheduler's `Request`, None once it has ended."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, logprobs=0, max_tokens=max_tokens)
    engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
    (known,) = [one for one in scheduler_of(engine).requests if one == name or one.startswith(f"{name}-")]
    return lambda: scheduler_of(engine).requests.get(known)


def state_of(request: Any) -> str:
    """One of `STATES`."""
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        return "loading"
    if request.status.name != "RUNNING":
        return "waiting"
    return "decoding" if request.num_output_tokens > 1 else "prefilling"


def abort(
    engine: Any, wanted: str, victims: Sequence[Sequence[int]], others: Sequence[Sequence[int]], max_tokens: int
) -> list[Answer]:
    """Abort `victims` when all of them are in a state; what `others`, which run beside and after them, are answered."""
    answers: dict[str, Answer] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished and output.request_id.startswith("other"):
                answers[output.request_id] = Answer.of(output)

    if wanted == "loading":
        faults.hold_reads()
    found = [add(engine, f"victim{i}", prompt, 400) for i, prompt in enumerate(victims)]
    beside = len(others) // 2
    if wanted != "waiting":
        for _ in range(STEP_LIMIT):
            step()
            if {state_of(request()) for request in found} == {wanted}:
                break
        else:
            raise AssertionError(f"victims are {[state_of(request()) for request in found]}, never all {wanted}")
    for i, prompt in enumerate(others[:beside]):
        add(engine, f"other{i}", prompt, max_tokens)
    assert {state_of(request()) for request in found} == {wanted}
    engine.abort_request([f"victim{i}" for i in range(len(victims))])
    for i, prompt in enumerate(others[beside:], beside):
        add(engine, f"other{i}", prompt, max_tokens)
    if wanted == "loading":
        # The store answers when others may have got the blocks.
        for _ in range(3):
            step()
        faults.let_reads_go()
    for _ in range(STEP_LIMIT):
        if not engine.has_unfinished_requests():
            break
        step()
    return [answers[f"other{i}"] for i in range(len(others))]


def hook_seconds(engine: Any, prompts: Sequence[Sequence[int]], num_steps: int) -> list[float]:
    """Seconds that all hooks of both sides together take of each of `num_steps` decoding steps of all `prompts`.

    Of the processor: what else the machine does stretches the seconds of the clock.
    """
    spent = depth = 0.0

    def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal spent, depth
            depth += 1
            started = time.thread_time()
            try:
                return hook(*arguments, **named)
            finally:
                depth -= 1
                # A hook may call another.
                spent += 0 if depth else time.thread_time() - started

        return call

    connectors = sides(engine)
    for connector in connectors:
        for name in dir(type(connector)):
            if not name.startswith("_") and callable(getattr(type(connector), name)):
                setattr(connector, name, timed(getattr(connector, name)))
    found = [add(engine, f"running{i}", prompt, 400) for i, prompt in enumerate(prompts)]
    while {state_of(request()) for request in found} != {"decoding"}:
        engine.step()
    seconds = []
    for _ in range(num_steps):
        spent = 0.0
        engine.step()
        seconds.append(spent)
    assert {state_of(request()) for request in found} == {"decoding"}, "a request ended within the measured steps"
    assert statistics.median(seconds) > 0, "the hooks were not measured"
    engine.abort_request([f"running{i}" for i in range(len(prompts))])
    while engine.has_unfinished_requests():
        engine.step()
    for connector in connectors:
        for name in dir(type(connector)):
            connector.__dict__.pop(name, None)
    return seconds


def transfer_trials(engine: Any) -> list[tuple[int, int]]:
    """By shard, how often saves and loads tried both ways; none where transfer is not learnt."""
    transfers = [way for one in children(sides(engine)[1]) for way in one._worker._saver._transfers]
    return [(way.saves._num_tried, way.loads._num_tried) for way in transfers if isinstance(way, LearntTransfer)]
