"""The connector's counts come out of vLLM's Prometheus hook under the documented names, for the right engine."""

from __future__ import annotations

from types import SimpleNamespace

import prometheus_client

from kvpool_connector.vllm import KVPoolConnector

LABELS = {"model_name": "m", "result": "ok"}


def test_counts_are_added_by_engine_and_result() -> None:
    types = {kind: kind for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)}
    metrics = KVPoolConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    metrics.observe({"load_blocks_ok": 3, "request-17": 9}, 1)
    metrics.observe({"load_blocks_ok": 2}, 1)
    name, value = "vllm:kvpool_load_blocks_total", prometheus_client.REGISTRY.get_sample_value
    assert value(name, {**LABELS, "engine": "1"}) == 5
    assert value(name, {**LABELS, "engine": "0"}) == 0
    assert value(name, {**LABELS, "engine": "0", "result": "corrupt"}) == 0, "its first growth would not be seen"
    assert value(name, {**LABELS, "engine": "0", "result": "request-17"}) is None
