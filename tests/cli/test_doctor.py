"""`doctor` and `bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool_connector.cli.doctor import Checkup
from kvpool_connector.cli.endpoint import MasterEndpoint
from kvpool_connector.cli.finding import Level
from kvpool_connector.cli.machine import hash_seed, locked_memory, memory
from kvpool_connector.cli.session import Session
from kvpool_connector.config import GIB, PoolSettings, StoreSettings
from kvpool_connector.contract.status import Status
from kvpool_connector.hashing import Hashing, check_hashing, hashing_key
from kvpool_connector.mooncake import MooncakeStore
from tests.cli.pool import SEED, Pool, fill

FAST = ("--model", "qwen3-8b", "--blocks", "1", "--extra-config", '{"max_bytes_per_call": "20MB"}')


def by_check(answer: Any) -> dict[str, Any]:
    return {finding["check"]: finding for finding in answer["findings"]}


def test_a_pool_in_order(pool: Pool) -> None:
    environ = {"MOONCAKE_MASTER": pool.address, "PYTHONHASHSEED": SEED, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "16MB"}
    before = pool.keys()
    found = by_check(pool.ask("doctor", *FAST, environ=environ, status=1 if tight(pool, environ) else 0))
    assert found["self-test"]["level"] == "ok"
    assert "byte for byte" in found["self-test"]["what"]
    assert found["registration"]["level"] == found["endpoint"]["level"] == "ok"
    assert found["lease"]["level"] == "ok"
    assert pool.keys() == before


CHECKS = {
    "versions": "other bytes or hooks than expected",
    "configuration": "engines that do not start, or on another master",
    "hash seed": "two nodes with other hashes of one prompt",
    "memory": "segments that do not fit",
    "locked memory": "staging that cannot be registered",
    "lookup": "a scheduler that cannot ask",
    "ports": "a master behind a firewall, or at another port",
    "endpoint": "a pool without memory",
    "tenant": "a tenant that the master refuses, or does not keep apart",
    "client": "a master that cannot be reached",
    "registration": "memory that the store refuses",
    "self-test": "a store that returns other bytes, or nothing",
    "lease": "objects that go between lookup and load",
    "hashes": "engines whose hashes of one prompt differ",
    "namespace": "deployments that differ and share nothing",
}
"""What makes a pool miss in silence, by the check that finds it."""


@pytest.mark.parametrize("up", [True, False], ids=["a pool in order", "no pool"])
def test_h6_one_command_looks_at_all_that_makes_a_pool_miss(pool: Pool, up: bool) -> None:
    if up:
        environ = {"MOONCAKE_MASTER": pool.address, "PYTHONHASHSEED": SEED, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "16MB"}
        found = by_check(pool.ask("doctor", *FAST, environ=environ, status=1 if tight(pool, environ) else 0))
        assert {finding["level"] for finding in found.values()} <= {"ok", "warning"}
    else:
        dead = {"MOONCAKE_MASTER": "127.0.0.1:1"}
        found = by_check(pool.ask("doctor", *FAST, status=2, environ=dead, endpoint="127.0.0.1:1"))
    assert found.keys() == CHECKS.keys(), "what cannot be checked is said, not left out"


def tight(pool: Pool, environ: dict[str, str]) -> bool:
    """Whether this machine's own memory is a warning."""
    settings = StoreSettings.from_environment(environ)
    return memory(settings, PoolSettings(), 1).level is not Level.WELL


def test_a_short_lease_is_found(pool: Pool) -> None:
    found = by_check(pool.ask("doctor", *FAST[:-1], '{"max_bytes_per_call": "1GB"}', status=1))
    assert found["lease"]["level"] == "warning"
    assert "--default_kv_lease_ttl 11737" in found["lease"]["remedy"]


def test_an_unreachable_master_ends_in_findings(pool: Pool) -> None:
    answer = pool.ask("doctor", *FAST, status=2, environ={"MOONCAKE_MASTER": "127.0.0.1:1"}, endpoint="127.0.0.1:1")
    found = by_check(answer)
    assert found["client"]["level"] == found["endpoint"]["level"] == "error"
    assert "127.0.0.1:1" in found["client"]["remedy"]
    assert found["self-test"]["level"] == "not checked"
    assert found["hash seed"]["level"] == "warning"
    for finding in answer["findings"]:
        if finding["level"] in ("warning", "error"):
            assert all(finding[name] for name in ("what", "why", "remedy")), finding


def test_a_wrong_configuration_is_a_finding(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": pool.address, "protocoll": "tcp"}))
    found = by_check(pool.ask("doctor", *FAST, "--config", str(path), status=2))
    assert "nearest known one is 'protocol'" in found["configuration"]["remedy"]
    assert found["client"]["level"] == "not checked"


def test_other_bytes_than_stored_are_found(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpool_connector.host import HostCopier

    right = HostCopier.gather
    monkeypatch.setattr(HostCopier, "gather", lambda self, ids, at: right(self, [1 - i for i in ids], at))
    found = by_check(pool.ask("doctor", "--model", "qwen3-8b", "--blocks", "2", status=2))
    assert "other bytes" in found["self-test"]["what"]


@pytest.mark.parametrize(
    ("status", "remedy"), [(Status.NO_SPACE, "global_segment_size"), (Status.UNAVAILABLE, "log of the master")]
)
def test_blocks_that_are_not_stored_are_not_taken_for_wrong_ones(
    pool: Pool, status: Status, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MooncakeStore, "put", lambda self, keys, *pieces: [status] * len(keys))
    found = by_check(pool.ask("doctor", *FAST, status=2))["self-test"]
    assert status.value in found["what"]
    assert "other bytes" not in found["what"]
    assert remedy in found["remedy"]
    assert (
        status.value
        in pool.ask("bench", "--model", "qwen3-8b", "--blocks", "1", "--repeats", "1", status=2)["failures"][0]
    )


def test_foreign_objects_in_the_namespace_are_a_finding(pool: Pool, namespace: str, foreign: str) -> None:
    extra = json.dumps({"max_bytes_per_call": "20MB", "namespace": namespace})
    found = by_check(pool.ask("doctor", *FAST[:-1], extra, status=1))
    assert found["namespace"]["level"] == "warning"
    assert foreign in found["namespace"]["what"]


@pytest.mark.parametrize(
    ("seed", "level", "remedy"),
    [(SEED, "ok", ""), ("8", "warning", "PYTHONHASHSEED=8"), (None, "warning", "without PYTHONHASHSEED")],
)
def test_b11_an_environment_that_would_hit_nothing_is_a_finding(
    pool: Pool, namespace: str, seed: str | None, level: str, remedy: str
) -> None:
    check_hashing(Hashing("sha256", seed, "ab"), pool.store, namespace, 0)
    extra = json.dumps({"max_bytes_per_call": "20MB", "namespace": namespace})
    found = by_check(pool.ask("doctor", *FAST[:-1], extra, status=level == "warning"))["hashes"]
    assert found["level"] == level
    assert remedy in found["remedy"]
    assert "sha256" in found["what"]
    pool.ask("clear", "--namespace", namespace, "--yes", "--force")
    assert pool.store.exist([hashing_key(namespace, 0)]) == [Status.MISS]


def test_deployments_that_do_not_share_are_a_finding(pool: Pool, namespace: str) -> None:
    fill(pool, namespace, [1, 2, 3, 4], tp_size=1)
    fill(pool, namespace, [1, 2, 3, 4], tp_size=2)
    extra = json.dumps({"max_bytes_per_call": "20MB", "namespace": namespace})
    found = by_check(pool.ask("doctor", *FAST[:-1], extra, status=1))
    assert "2 kinds of deployment of 1 models" in found["namespace"]["what"]
    assert "kv_head_split" in found["namespace"]["remedy"]


def test_a_tenant_that_nobody_keeps_apart_is_a_finding(pool: Pool) -> None:
    environ = {"MOONCAKE_MASTER": pool.address, "PYTHONHASHSEED": SEED, "MOONCAKE_TENANT_ID": "tenant-b"}
    found = by_check(pool.ask("doctor", *FAST, environ=environ, status=1))["tenant"]
    assert found["level"] == "warning"
    assert "--enable_multi_tenants" in found["remedy"]


@pytest.mark.parametrize(("tenant", "level"), [("tenant-a", "ok"), ("default", "ok"), ("tenant-b", "error")])
def test_a_tenant_is_held_against_the_masters_policy(
    pool: Pool, tenant: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"success":true,"data":[{"tenant_id":"default"},{"tenant_id":"tenant-a"}]}'
    monkeypatch.setattr(MasterEndpoint, "_get", lambda self, path, *also: body)
    settings = StoreSettings(master_server_address=pool.address, tenant_id=tenant)
    found = Checkup(Session(endpoint=pool.endpoint))._tenant(settings)
    assert found.level.value == level
    if level == "error":
        assert "'default', 'tenant-a'" in found.what


def test_settings_that_are_not_the_defaults_are_told(pool: Pool) -> None:
    extra = {"max_bytes_per_call": "20MB", "kv_head_split": [4, 8], "min_tokens_to_load": "auto", "prefill_pp_size": 2}
    environ = {"MOONCAKE_MASTER": pool.address, "PYTHONHASHSEED": SEED, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "16MB"}
    status = 1 if tight(pool, environ) else 0
    found = by_check(pool.ask("doctor", *FAST[:-1], json.dumps(extra), environ=environ, status=status))
    words = found["configuration"]["what"]
    for setting in ("kv_head_split [4, 8]", 'min_tokens_to_load "auto"', "prefill_pp_size 2"):
        assert setting in words
    assert "lookup_timeout_s" not in words


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--extra-config", "{"], "not JSON"),
        (["--extra-config", "[]"], "expected a JSON object"),
        (["--extra-config", '{"staging": 1}'], "staging_bytes"),
        (["--model", "gpt-2"], "not listed"),
        (["--endpoint", "here"], "host:port"),
    ],
)
def test_wrong_options_are_named(pool: Pool, options: list[str], word: str) -> None:
    answer = pool.ask("doctor", *options, "--blocks", "1", status=2)
    assert word in answer.get("error", json.dumps(answer))


def test_bench_measures_three_ways_and_leaves_nothing(pool: Pool) -> None:
    before = pool.keys()
    found = pool.ask("bench", "--model", "qwen3-8b", "--blocks", "2", "--repeats", "1", "--tensor-parallel-size", "8")
    assert set(found["bytes_per_s"]) == {"raw store", "connector, packed", "connector, direct"}
    assert found["object_bytes"] == 36 * 2 * 128 * 128 * 2
    assert all(speed > 0 for both in found["bytes_per_s"].values() for speed in both.values())
    assert pool.keys() == before


@pytest.mark.parametrize(("tp_size", "word"), [("3", "splits the 8 KV heads")])
def test_bench_names_what_it_cannot_do(pool: Pool, tp_size: str, word: str) -> None:
    assert word in pool.ask("bench", "--model", "qwen3-8b", "--tensor-parallel-size", tp_size, status=2)["error"]
    assert "127.0.0.1:1" in pool.ask("bench", "--model", "qwen3-8b", "--master", "127.0.0.1:1", status=2)["error"]


def test_f7_segments_of_all_ranks_are_held_against_memory() -> None:
    settings = StoreSettings(master_server_address="a:1", global_segment_size=16 * GIB)
    meminfo = "MemTotal: 268435456 kB\nMemAvailable: 201326592 kB\n"
    assert memory(settings, PoolSettings(), 8, meminfo).level is Level.WELL
    assert memory(settings, PoolSettings(), 11, meminfo).level is Level.WARNING
    too_much = memory(settings, PoolSettings(), 16, meminfo)
    assert too_much.level is Level.ERROR
    room = int(too_much.remedy.split("at most ")[1].split("MB")[0]) << 20
    assert memory(settings.model_copy(update={"global_segment_size": room}), PoolSettings(), 16, meminfo).level is (
        Level.WELL
    )


def test_locked_memory_matters_where_the_transport_locks() -> None:
    settings = StoreSettings(master_server_address="a:1", protocol="rdma")
    assert locked_memory(settings, 1, 8 << 20).level is Level.ERROR
    assert locked_memory(settings, 1, 8 * GIB).level is Level.WELL
    assert locked_memory(settings.model_copy(update={"protocol": "tcp"}), 1, 0).level is Level.WELL


@pytest.mark.parametrize(("seed", "level"), [("0", Level.WELL), ("", Level.WARNING), ("random", Level.ERROR)])
def test_the_hash_seed_is_a_number(seed: str, level: Level) -> None:
    assert hash_seed({"PYTHONHASHSEED": seed}).level is level
