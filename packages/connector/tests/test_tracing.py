"""Spans say what became of a request's lookup, load and saves, under the context that came with it."""

from __future__ import annotations

import time

import pytest
import torch
from stores import DictStore
from test_layerwise import LAYERS, LayerRig
from test_scheduler import Bench
from test_worker import Rig, group

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.host import HostDevice
from kvpool_connector.metadata import LoadJob, SaveJob, StepMetadata
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


def test_a_save_keeps_the_context_of_its_request() -> None:
    bench = Bench()
    view = bench.view(40, trace_headers=HEADERS)
    bench.scheduler.num_matched_tokens(view, 0)
    bench.scheduler.allocated(view, [[1, 2, 3]], 0)
    (job,) = bench.schedule(view, 0, 40, [[1, 2, 3]], True)
    assert job.trace_headers == HEADERS


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


def save(rig: Rig, blocks: dict[int, int]) -> list[Span]:
    """The spans of one step that saves blocks of two requests, once the worker has ended."""
    spans: list[Span] = []
    rig.worker._trace = spans.append
    jobs = [
        SaveJob(name, (group({block: content}),), trace_headers=HEADERS)
        for name, (block, content) in zip("rs", blocks.items(), strict=True)
    ]
    step = StepMetadata(saves=tuple(jobs))
    rig.worker.begin_step(step)
    for layer in LAYERS if isinstance(rig, LayerRig) else ():
        rig.worker.save_layer(layer)
    rig.worker.end_step(step)
    rig.worker.close()
    return sorted(spans, key=lambda span: str(span.attributes["kvpool.request_id"]))


@pytest.mark.parametrize("by_layers", [False, True])
def test_a_save_is_a_span_a_request_with_what_became_of_its_blocks(by_layers: bool) -> None:
    rig = LayerRig() if by_layers else Rig()
    rig.store.objects[rig.worker._part.shards[0].key(group({2: 12}).block_hashes[0])] = b"another's"
    before = time.time_ns()
    first, second = save(rig, {1: 11, 2: 12})
    for span, request_id, stored in ((first, "r", 1), (second, "s", 0)):
        assert (span.name, span.headers) == ("kvpool.save", HEADERS)
        assert before <= span.start_ns <= span.end_ns <= time.time_ns()
        assert span.attributes == {
            "kvpool.request_id": request_id,
            "kvpool.blocks": 1,
            "kvpool.stored": stored,
            "kvpool.present": 1 - stored,
            "kvpool.not_stored": 0,
            "kvpool.rank": str(Rank()),
        }


@pytest.mark.parametrize("by_layers", [False, True])
@pytest.mark.parametrize("why", ["queue", "outage", "store"])
def test_a_save_that_does_not_happen_is_a_span_too(why: str, by_layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, object] = {"max_queued_blocks": 1} if why == "queue" else {"outage_pause_s": 100}
    rig = LayerRig(**options) if by_layers else Rig(**options)  # type: ignore[arg-type]
    if why == "outage":
        rig.worker._outage.note([Status.UNAVAILABLE])
    if why == "store":

        def broken(*arguments: object) -> list[Status]:
            raise RuntimeError("the store broke")

        monkeypatch.setattr(rig.store, "begin_put" if by_layers else "put", broken)
    blocks = {1: 11, 2: 12}
    if why == "queue" and not by_layers:
        # Both jobs fit one after the other; one job of two blocks never does.
        spans: list[Span] = []
        rig.worker._trace = spans.append
        step = StepMetadata(saves=(SaveJob("r", (group(blocks),)),))
        rig.worker.begin_step(step)
        rig.worker.end_step(step)
        rig.worker.close()
        assert [span.attributes["kvpool.not_stored"] for span in spans] == [2]
    else:
        assert [span.attributes["kvpool.not_stored"] for span in save(rig, blocks)] == [1, 1]


def test_e3_a_trace_that_raises_fails_nothing() -> None:
    def broken(span: Span) -> None:
        raise RuntimeError(f"no collector for {span.name}")

    bench = Bench(trace=broken)
    view = bench.view(70)
    bench.store(view, range(2))
    assert bench.scheduler.num_matched_tokens(view, 0) == (32, False)
