"""A real vLLM engine in a process of its own: fresh each time, and unable to take the tests with it."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_LIMIT_S = 180.0
ANSWER_LIMIT_S = 120.0


@dataclass(frozen=True)
class EngineSpec:
    """How an engine is started."""

    model: Path
    block_size: int
    pool: dict[str, Any] | None = None
    """`kv_connector_extra_config`, or None for an engine without a connector."""
    connector: str = "KVPoolConnector"
    role: str = "kv_both"
    policy: str = "recompute"
    mooncake_json: Path | None = None
    tensor_parallel_size: int = 1
    processes: bool = False
    """Run the engine's core in a process of its own, as a server does."""
    num_blocks: int | None = None
    patches: tuple[str, ...] = ()
    """`module:function` called in the engine's process before it starts (without `processes`)."""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What an engine answered to one prompt."""

    tokens: tuple[int, ...]
    num_cached_tokens: int
    """Of the prompt, from the pool and the local cache together."""
    first_token_s: float


class EngineError(RuntimeError):
    """The engine could not start or failed; carries the other process's trace."""


def environment(spec: EngineSpec) -> dict[str, str]:
    """Environment variables of an engine's process."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if spec.processes else "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if spec.tensor_parallel_size > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(spec.tensor_parallel_size))
    if spec.mooncake_json is not None:
        variables["MOONCAKE_CONFIG_PATH"] = str(spec.mooncake_json)
    return variables


def transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """`kv_transfer_config` of an engine with the pool."""
    return {
        "kv_connector": spec.connector,
        "kv_connector_module_path": "kvpool_connector.vllm",
        "kv_role": spec.role,
        "kv_load_failure_policy": spec.policy,
        "kv_connector_extra_config": spec.pool,
    }


def serve(connection: Connection, spec: EngineSpec, log: str) -> None:
    """The engine's process; what it and its libraries print goes to `log`."""
    # A group of its own, so that its children can be ended with it.
    os.setpgrp()
    with open(log, "wb", buffering=0) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    try:
        for patch in spec.patches:
            module, _, function = patch.partition(":")
            getattr(importlib.import_module(module), function)()
        from vllm import LLM, SamplingParams

        arguments: dict[str, Any] = {
            "model": str(spec.model),
            "block_size": spec.block_size,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 4096,
            "disable_log_stats": False,
            "tensor_parallel_size": spec.tensor_parallel_size,
            **spec.arguments,
        }
        if spec.model.name.startswith("mla"):
            # vLLM's CPU rotary op gives batch-dependent results for this family (0.32.0).
            arguments["compilation_config"] = {"custom_ops": ["none"]}
        if spec.num_blocks is not None:
            arguments["num_gpu_blocks_override"] = spec.num_blocks
        if spec.pool is not None:
            arguments["kv_transfer_config"] = transfer_config(spec)
        engine = LLM(**arguments)
        connection.send((True, None))
        while (request := connection.recv()) is not None:
            prompts, sampling = request
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                SamplingParams(temperature=0, ignore_eos=True, **sampling),
                use_tqdm=False,
            )
            answers = [
                Answer(tuple(o.outputs[0].token_ids), o.num_cached_tokens or 0, o.metrics.first_token_latency)
                for o in outputs
            ]
            connection.send((True, answers))
        engine.llm_engine.engine_core.shutdown()
        connection.send((True, None))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise


class Engine:
    """A running engine."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start it. Raises `EngineError` when it does not start within the limit."""
        self._connection, other = multiprocessing.Pipe()
        self._log = Path(tempfile.mkstemp(prefix="kvpool-engine-", suffix=".log")[1])
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=(other, spec, str(self._log)))
        before = {name: os.environ.get(name) for name in environment(spec)}
        os.environ.update(environment(spec))
        try:
            self._process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name)
                else:
                    os.environ[name] = value
        other.close()
        try:
            self._answer("start", START_LIMIT_S)
        except EngineError:
            self.kill()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **sampling: Any) -> list[Answer]:
        """Greedy tokens for each prompt of token ids."""
        self._connection.send(([list(prompt) for prompt in prompts], {"max_tokens": max_tokens, **sampling}))
        answers: list[Answer] = self._answer("generate", ANSWER_LIMIT_S)
        return answers

    def _answer(self, what: str, limit_s: float) -> Any:
        deadline = time.monotonic() + limit_s
        while not self._connection.poll(0.2):
            if time.monotonic() > deadline:
                raise EngineError(f"the engine did not {what} within {limit_s:g} s; it printed:\n{self._printed()}")
            if not self._process.is_alive() and not self._connection.poll():
                code = self._process.exitcode
                raise EngineError(f"the engine ended with {code} instead of: {what}; it printed:\n{self._printed()}")
        done, value = self._connection.recv()
        if not done:
            raise EngineError(value)
        return value

    def _printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def close(self) -> None:
        """Shut down as a user would, which stores what is queued."""
        if self._process.is_alive():
            self._connection.send(None)
            self._answer("shut down", 60)
            self._process.join(30)
        self.kill()

    def kill(self) -> None:
        """End the process and its children."""
        if self._process.pid is not None and self._process.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join(10)
        self._connection.close()
        self._log.unlink(missing_ok=True)


@contextmanager
def engine(spec: EngineSpec) -> Iterator[Engine]:
    """A running engine, shut down at the end."""
    running = Engine(spec)
    try:
        yield running
        running.close()
    finally:
        running.kill()


def write_mooncake_json(path: Path, address: str, **more: Any) -> Path:
    """A `mooncake.json` for an engine that gives no memory."""
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": address,
        "global_segment_size": 0,
        "local_buffer_size": "16MB",
        **more,
    }
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path
