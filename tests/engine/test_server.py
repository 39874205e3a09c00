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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.engine.collector import Collector, collector
from tests.engine.engine import engine
from tests.engine.prompts import PROMPTS, poolable
from tests.engine.serving import Answer
from tests.engine.spec import MAX_MODEL_LEN, EngineSpec
from tests.targets.real_mooncake import free_port

START_LIMIT_S = 180.0


@contextmanager
def server(spec: EngineSpec, log: Path, *more: str, **environment: str) -> Iterator[str]:
    """A running server with `more` arguments, which prints to `log`; its address."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port), "--model", str(spec.model), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)),
        *("--block-size", str(spec.block_size), "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(spec.transfer_config())),
        *more,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **spec.environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        # Whatever is left of its processes; none if all went well.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def wait_until_healthy(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return when the server answers; fail with what it printed when it ends before or takes too long."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            pass
        ended, late = process.poll() is not None, time.monotonic() > deadline
        assert not ended, f"the server ended with {process.returncode}:\n{log.read_text(errors='replace')[-3000:]}"
        assert not late, f"no answer within {START_LIMIT_S:g} s:\n{log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.5)


def complete(address: str, prompt: list[int], **headers: str) -> dict[str, Any]:
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
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def attributes(span: Span) -> dict[str, Any]:
    """Of a span, as Python values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_server_answers_from_the_pool_and_fills_it(
    filled: Callable[[str], EngineSpec], baseline: Callable[[str], list[Answer]], tmp_path: Path
) -> None:
    made = filled("gqa")
    another = list(range(1, 200))
    traces = [f"{number:032x}" for number in range(1, len(PROMPTS) + 1)]
    with (
        collector() as found,
        server(
            made,
            tmp_path / "server.log",
            *("--otlp-traces-endpoint", found.endpoint),
            OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
            VLLM_LOGGING_LEVEL="INFO",
        ) as address,
    ):
        for trace, prompt, expected, hit in zip(
            traces, PROMPTS, baseline("gqa"), poolable(made.block_size), strict=True
        ):
            answer = complete(address, prompt, traceparent=f"00-{trace}-00000000000000aa-01")
            assert tuple(answer["choices"][0]["token_ids"]) == expected.tokens
            details = answer["usage"]["prompt_tokens_details"] or {}
            assert details.get("cached_tokens", 0) == hit
        saved = f"{len(PROMPTS) + 1:032x}"
        complete(address, list(range(200, 100, -1)), traceparent=f"00-{saved}-00000000000000aa-01")
        assert_save_traced(found, saved, 100 // made.block_size)
        given = complete(address, another)
        assert_traced(found, traces, made.block_size)
    joined = [line for line in (tmp_path / "server.log").read_text().splitlines() if "event=joined" in line]
    assert made.mooncake_json is not None
    master = json.loads(made.mooncake_json.read_text())["master_server_address"]
    assert [f"master={master} as=127.0.0.1:" in line for line in joined] == [True] * 2, (
        "scheduler's and worker's client"
    )
    # The server was told to end right after its answer, and stored what it had first.
    with engine(made) as loading:
        (loaded,) = loading.generate([another])
    assert loaded.tokens == tuple(given["choices"][0]["token_ids"])
    assert loaded.num_cached_tokens == len(another) // made.block_size * made.block_size


def assert_save_traced(found: Collector, trace: str, num_blocks: int) -> None:
    """All blocks of a new prompt were stored, under the trace of its request."""
    spans = [attributes(span) for span in found.named("kvpool.save", 1, trace)]
    assert sum(span["kvpool.blocks"] for span in spans) == num_blocks
    assert sum(span["kvpool.stored"] for span in spans) == num_blocks


def assert_traced(found: Collector, traces: list[str], block_size: int) -> None:
    """Each request's lookup and load are spans of its own trace, beside vLLM's own, with what they found."""
    # A prompt of less than a block is not looked up.
    hits = {trace: hit for trace, hit in zip(traces, poolable(block_size), strict=True) if hit}
    assert len(hits) > 1
    for name in ("kvpool.lookup", "kvpool.load", "llm_request"):
        spans = {span.trace_id.hex(): span for span in found.named(name, len(hits))}
        assert set(hits) <= set(spans), name
        for trace, hit in hits.items():
            span = spans[trace]
            assert span.parent_span_id.hex() == "00000000000000aa"
            assert span.start_time_unix_nano < span.end_time_unix_nano
            if name == "kvpool.lookup":
                assert attributes(span)["kvpool.result"] == "hit"
                assert attributes(span)["kvpool.hit_tokens"] == hit
            if name == "kvpool.load":
                assert attributes(span)["kvpool.blocks"] == hit // block_size
                assert attributes(span)["kvpool.failed_blocks"] == 0
