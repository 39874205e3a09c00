"""`ls`, `stat`, `verify`, `clear`: what there is, whether it is right, and removing one namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_connector.contract.status import Status
from kvpool_connector.epoch import marker
from tests.cli.pool import Pool, fill
from tests.targets.borrowed import Borrowed
from tests.targets.node import LocalNode

TOKENS = list(range(12))
NOWHERE = "127.0.0.1:1"


def test_ls_names_each_object_with_its_size(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    found = pool.ask("ls", "--namespace", namespace)
    expected = {filled.key(rank, block) for rank in range(2) for block in range(3)}
    assert {row["key"] for row in found["objects"]} == expected
    assert {row["bytes"] for row in found["objects"]} == {filled.object_bytes}
    assert {row["namespace"] for row in found["objects"]} == {namespace}
    assert {row["fingerprint"] for row in found["objects"]} == {shard.fingerprint for shard in filled.shards}
    assert len(pool.ask("ls", "--namespace", namespace, "--limit", "1")["objects"]) == 1


def test_stat_decodes_what_fingerprints_stand_for(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS, model="deepseek-ai/DeepSeek-V3")
    found = pool.ask("stat", "--namespace", namespace)
    assert {shard["fingerprint"] for shard in found["shards"]} == {shard.fingerprint for shard in filled.shards}
    for shard in found["shards"]:
        assert shard["num_objects"] == 3
        assert shard["bytes"] == 3 * filled.object_bytes
        assert shard["descriptor"]["model"]["name"] == "deepseek-ai/DeepSeek-V3"
        assert shard["descriptor"]["layers"] == "2 layers 0..1"
        assert "k bfloat16 (4, 1, 8) NHD x2" in shard["descriptor"]["components"]
    assert found["capacity_bytes"] == 1 << 30
    assert found["used_bytes"] >= 6 * filled.object_bytes
    assert "master_evicted_key_count" in found["counters"]


def test_looking_leases_nothing(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    pool.ask("ls", "--namespace", namespace)
    pool.ask("stat", "--namespace", namespace)
    pool.ask("verify", "--namespace", namespace, "--sizes-only")
    keys = [filled.key(rank, block) for rank in range(2) for block in range(3)]
    assert all(status.ok for status in pool.store.remove(keys))


def test_a_right_namespace_verifies(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    assert pool.ask("verify", "--namespace", namespace)["checked"] == 8
    assert pool.ask("verify", filled.key(1, 2))["wrong"] == []


@pytest.mark.parametrize("sizes_only", [True, False])
def test_an_object_of_another_size_is_found(pool: Pool, namespace: str, sizes_only: bool) -> None:
    filled = fill(pool, namespace, TOKENS)
    pool.overwrite(filled.key(1, 1), b"short")
    before = pool.run("ls", "--namespace", namespace).stdout
    options = ["--sizes-only"] if sizes_only else []
    found = pool.ask("verify", "--namespace", namespace, *options, status=2)
    assert [(fault["key"], "promises" in fault["why"]) for fault in found["wrong"]] == [(filled.key(1, 1), True)]
    assert pool.run("ls", "--namespace", namespace).stdout == before


@pytest.mark.parametrize("value", [b"{}", b"\xff", b"[" * 100_000, b'{"format_version": 1}'])
def test_a_corrupt_descriptor_is_found(pool: Pool, namespace: str, value: bytes) -> None:
    filled = fill(pool, namespace, TOKENS)
    key = filled.shards[0].descriptor_key()
    pool.overwrite(key, value)
    found = pool.ask("verify", "--namespace", namespace, status=2)
    assert [fault["key"] for fault in found["wrong"]] == [key]
    assert "corrupt" in found["wrong"][0]["why"]
    shards = pool.ask("stat", "--namespace", namespace, status=2)["shards"]
    assert sorted(bool(shard["trouble"]) for shard in shards) == [False, True]


def test_a_descriptor_that_is_too_large_is_not_read(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    pool.overwrite(filled.shards[0].descriptor_key(), bytes((8 << 20) + 1))
    found = pool.ask("verify", "--namespace", namespace, status=2)
    assert "8388609 bytes, at most" in found["wrong"][0]["why"]


def test_a_descriptor_of_another_shard_is_found(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    other = pool.store.read(filled.shards[1].descriptor_key())[1]
    pool.overwrite(filled.shards[0].descriptor_key(), other)
    found = pool.ask("verify", "--namespace", namespace, status=2)
    assert "another's" in found["wrong"][0]["why"]


def test_objects_without_a_descriptor_are_named_as_unchecked(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    pool.store.remove([filled.shards[0].descriptor_key()], force=True)
    found = pool.ask("verify", "--namespace", namespace, status=1)
    assert "3 unchecked" in found["unchecked"][0]


def test_a_key_of_nothing_in_the_pool_is_an_error(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    key = filled.key(0, 0)
    for absent in (key[:-4] + "0000", key.replace(filled.shards[0].fingerprint, "0" * 32)):
        found = pool.ask("verify", key, absent, status=2)
        assert found["wrong"] == [{"key": absent, "why": "not in the pool"}]


def test_clear_removes_one_namespace_and_no_other(pool: Pool, namespace: str) -> None:
    fill(pool, namespace, TOKENS)
    neighbour = fill(pool, namespace + "0", TOKENS)
    assert pool.ask("clear", "--namespace", namespace, "--yes", "--force")["removed"] == 8
    left = pool.ask("ls", "--namespace", namespace + "0")
    assert len(left["objects"]) == 6
    assert pool.ask("verify", "--namespace", neighbour.namespace)["checked"] == 8
    assert pool.ask("ls", "--namespace", namespace)["num_objects"] == 0


def test_clear_leaves_the_markers_of_resets(pool: Pool, namespace: str) -> None:
    fill(pool, namespace, TOKENS)
    key = marker(namespace, 1)
    assert pool.store.write(key, b"1", pinned=True).ok
    assert pool.ask("ls", "--namespace", namespace)["num_objects"] == 6
    assert pool.ask("clear", "--namespace", namespace, "--yes", "--force")["removed"] == 8
    assert pool.store.exist([key]) == [Status.OK]


def test_clear_leaves_what_is_being_read(pool: Pool, namespace: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    pool.store.exist([filled.key(0, 0)])
    found = pool.ask("clear", "--namespace", namespace, "--yes", status=1)
    assert (found["leased"], found["removed"]) == (1, 7)


def test_clear_asks_first(pool: Pool, namespace: str) -> None:
    fill(pool, namespace, TOKENS)
    before = pool.keys()
    result = pool.run("clear", "--namespace", namespace)
    assert result.exit_code != 0
    assert "Remove 8 objects" in result.stderr
    assert pool.ask("clear", "--namespace", namespace, status=2)["error"].endswith("Nothing was removed")
    assert pool.keys() == before


def test_clear_stops_at_foreign_objects_unless_told(pool: Pool, namespace: str, foreign: str) -> None:
    fill(pool, namespace, TOKENS)
    error = pool.ask("clear", "--namespace", namespace, "--yes", "--force", status=2)["error"]
    assert foreign in error
    assert len(pool.ask("ls", "--namespace", namespace, status=2)["objects"]) == 6
    pool.ask("clear", "--namespace", namespace, "--yes", "--force", "--leave-foreign")
    found = pool.ask("ls", "--namespace", namespace, status=2)
    assert (found["num_objects"], found["foreign"]) == (0, [foreign])


@pytest.mark.parametrize("command", [["ls"], ["stat"], ["verify"]])
def test_foreign_objects_under_our_prefix_are_named(
    pool: Pool, namespace: str, foreign: str, command: list[str]
) -> None:
    fill(pool, namespace, TOKENS)
    result = pool.run(*command, "--namespace", namespace)
    assert result.exit_code == 2
    assert "foreign" in result.stdout
    assert "not-a-fingerprint" in result.stdout


@pytest.mark.parametrize("text", ["", "nonsense", "kvpool1/a b/0/x", "kvpool1/a/00/" + "0" * 32 + "/ab", "é" * 300])
def test_a_wrong_key_is_named(pool: Pool, text: str) -> None:
    before = pool.keys()
    assert "is not a key" in pool.ask("verify", text, status=2)["error"]
    assert pool.keys() == before


@pytest.mark.parametrize(
    "command",
    [
        ["ls"],
        ["stat"],
        ["verify", "--namespace", "x"],
        ["clear", "--namespace", "x", "--yes"],
        ["explain", "--tokens-file", "TOKENS"],
    ],
    ids=lambda command: command[0],
)
def test_an_unreachable_endpoint_is_named(pool: Pool, command: list[str], tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("1 2 3")
    words = [str(tmp_path / "tokens") if word == "TOKENS" else word for word in command]
    error = pool.ask(*words, status=2, endpoint=NOWHERE)["error"]
    assert "does not answer at 127.0.0.1:1" in error
    assert "--endpoint" in error


@pytest.mark.parametrize("command", [["verify", "--namespace", "NAME"], ["clear", "--namespace", "NAME", "--yes"]])
def test_an_unreachable_master_is_named(pool: Pool, namespace: str, command: list[str]) -> None:
    fill(pool, namespace, TOKENS)
    words = [namespace if word == "NAME" else word for word in command]
    assert NOWHERE in pool.ask(*words, "--master", NOWHERE, status=2)["error"]
    assert len(pool.ask("ls", "--namespace", namespace)["objects"]) == 6


@pytest.mark.parametrize("command", ["verify", "clear"])
def test_an_empty_namespace_is_named(pool: Pool, command: str) -> None:
    options = ["--yes"] if command == "clear" else []
    assert "nothing of namespace 'nobody'" in pool.ask(command, "--namespace", "nobody", *options, status=2)["error"]


def test_another_http_server_is_named(pool: Pool) -> None:
    error = pool.ask("ls", status=2, endpoint=f"{pool.address}")["error"]
    assert "endpoint does not answer" in error or "does not answer as mooncake_master" in error


def test_heads_stored_by_themselves_are_decoded_and_one_deployment_for_all_sizes(
    pool: Pool, namespace: str, tmp_path: Path
) -> None:
    """With `kv_head_split`, as the connector itself writes them at TP 2 and at TP 4."""
    for tp_size in (2, 4):
        deployment = Deployment(NAMED_CASES["mha"], tp_size=tp_size, namespace=namespace, kv_head_split="head")
        for rank in range(tp_size):
            node = LocalNode(deployment, rank, Borrowed(pool.store))
            node.fill({1: "a"})
            node.save({1: "a"})
            node.close()
    shards = pool.ask("stat", "--namespace", namespace)["shards"]
    assert sorted(shard["descriptor"]["heads"]["first"] for shard in shards) == list(range(8))
    assert {shard["num_objects"] for shard in shards} == {1}
    table = " ".join(pool.run("stat", "--namespace", namespace).stdout.replace("│", " ").split())
    assert "of 8" in table
    (tmp_path / "tokens").write_text("1 2 3")
    asked = ("explain", "--namespace", namespace, "--tokens-file", str(tmp_path / "tokens"))
    (found,) = pool.ask(*asked, status=1)["deployments"]
    assert found["never_announced"] == []
