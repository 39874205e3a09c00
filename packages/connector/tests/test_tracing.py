"""Spans say what a request waited for, under the context that it came with; without tracing none is made."""

from __future__ import annotations

import time

import pytest
import torch
from stores import DictStore
from test_scheduler import Bench
from test_worker import group

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.host import HostDevice
from kvpool_connector.metadata import LoadJob, StepMetadata
from kvpool_connector.registration import GroupSpec
from kvpool_connector.tracing import Span
from kvpool_connector.worker import PoolWorker

HEADERS = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)


@pytest.mark.parametrize(("present", "result", "found"), [(range(2), "hit", 32), ((), "miss", 0)])
def test_a_lookup_is_a_span(present: range, result: str, found: int) -> None:
    spans: list[Span] = []
    bench = Bench(trace=spans.append)
    view = bench.view(70, trace_headers=HEADERS)
    bench.store(view, present)
    before = time.time_ns()
    assert bench.scheduler.num_matched_tokens(view, 0)[0] == found
    bench.scheduler.num_matched_tokens(view, 0)
    (span,) = spans
    assert (span.name, span.headers) == ("kvpool.lookup", HEADERS)
    assert before <= span.start_ns <= span.end_ns <= time.time_ns()
    assert span.attributes == {
        "kvpool.request_id": "r",
        "kvpool.result": result,
        "kvpool.keys": 4,
        "kvpool.tokens": 64,
        "kvpool.hit_tokens": found,
    }
    bench.scheduler.allocated(view, [[0, 1, 2, 3, 4]], found)
    assert [job.trace_headers for job in bench.scheduler.build_step([]).loads] == [HEADERS] * bool(found)


def test_an_outage_is_told_from_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[Span] = []
    bench = Bench(trace=spans.append)
    monkeypatch.setattr(bench.lookup, "exist", lambda keys: [Status.UNAVAILABLE] * len(keys))
    bench.scheduler.num_matched_tokens(bench.view(70), 0)
    assert spans[0].attributes["kvpool.result"] == "unanswered"


@pytest.mark.parametrize("between_steps", [False, True])
def test_a_load_is_a_span_with_its_failed_blocks(between_steps: bool) -> None:
    spans: list[Span] = []
    store = DictStore()
    caches = {"model.layers.0.attn": (torch.zeros(4, 16, 1, 8), torch.zeros(4, 16, 1, 8))}
    settings = PoolSettings(staging_bytes=3 << 20, namespace="test")
    rank = Rank()
    worker = PoolWorker(settings, store, HostDevice(), Topology(1), rank, ModelIdentity("m"), trace=spans.append)
    worker.register(caches, [GroupSpec(tuple(caches), 16, 4, kind="latent")])
    job = LoadJob("r", (group({1: 1, 2: 2}),), between_steps=between_steps, trace_headers=HEADERS)
    step = StepMetadata(loads=(job,))
    worker.begin_step(step)
    worker.start_loads(step)
    worker.end_step(step)
    while between_steps and not worker.take_loaded()[0]:
        pass
    (span,) = spans
    assert (span.name, span.headers) == ("kvpool.load", HEADERS)
    assert span.start_ns <= span.end_ns
    assert span.attributes == {
        "kvpool.request_id": "r",
        "kvpool.blocks": 2,
        "kvpool.failed_blocks": 2,
        "kvpool.rank": str(rank),
    }
    worker.close()


def test_e3_a_trace_that_raises_fails_nothing() -> None:
    def broken(span: Span) -> None:
        raise RuntimeError(f"no collector for {span.name}")

    bench = Bench(trace=broken)
    view = bench.view(70)
    bench.store(view, range(2))
    assert bench.scheduler.num_matched_tokens(view, 0) == (32, False)
