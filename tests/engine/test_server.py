"""An OpenAI server on loopback, asked over HTTP, answers from a pool that another engine filled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.engine.conftest import PROMPTS, poolable
from tests.engine.engine import Answer, EngineSpec, engine, environment, transfer_config
from tests.targets.real_mooncake import free_port

START_LIMIT_S = 180.0


@contextmanager
def server(spec: EngineSpec) -> Iterator[str]:
    """A running server; its address."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port), "--model", str(spec.model), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--block-size", str(spec.block_size)),
        *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer_config(spec))),
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment(spec)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "the server did not start in time"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def complete(address: str, prompt: list[int]) -> dict[str, Any]:
    """One completion of token ids."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_a_server_answers_from_the_pool(
    spec: Callable[..., EngineSpec], baseline: Callable[[str], list[Answer]]
) -> None:
    made = spec("gqa", "server", processes=True)
    with engine(made) as saving:
        saving.generate(PROMPTS)
    with server(made) as address:
        for prompt, expected, hit in zip(PROMPTS, baseline("gqa"), poolable(made.block_size), strict=True):
            answer = complete(address, prompt)
            assert tuple(answer["choices"][0]["token_ids"]) == expected.tokens
            details = answer["usage"]["prompt_tokens_details"] or {}
            assert details.get("cached_tokens", 0) == hit
