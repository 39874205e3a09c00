"""`explain`: the hit an engine would see, and why it is not more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.pool import Pool, fill

TOKENS = list(range(100, 113))
"""Three blocks of four and one token."""


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return str(path)


def only(pool: Pool, tokens: str, namespace: str, *options: str, status: int) -> Any:
    (found,) = pool.ask("explain", "--tokens-file", tokens, "--namespace", namespace, *options, status=status)[
        "deployments"
    ]
    return found


def test_h2_a_whole_hit(pool: Pool, namespace: str, tokens: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    found = only(pool, tokens, namespace, status=0)
    assert (found["hit_tokens"], found["most_tokens"]) == (12, 12)
    keys = {key["key"] for block in found["blocks"] for key in block["keys"]}
    assert keys == {filled.key(rank, block) for rank in range(2) for block in range(3)}


def test_one_token_is_always_computed(pool: Pool, namespace: str, tmp_path: Path) -> None:
    fill(pool, namespace, TOKENS)
    path = tmp_path / "tokens"
    path.write_text(" ".join(map(str, TOKENS[:8])))
    found = only(pool, str(path), namespace, status=0)
    assert (found["hit_tokens"], found["most_tokens"]) == (4, 4)
    path.write_text("100,101,102,103")
    assert "whole blocks" in only(pool, str(path), namespace, status=1)["why"]


def test_h2_the_rank_whose_object_is_missing_is_named(pool: Pool, namespace: str, tokens: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    pool.store.remove([filled.key(1, 1)], force=True)
    found = only(pool, tokens, namespace, status=1)
    assert found["hit_tokens"] == 4
    assert "Block 1 of group 0 is there in part" in found["why"]
    assert "KV heads 1..1 of 2" in found["why"]
    assert "KV heads 0..0" not in found["why"]


def test_a_rank_that_never_announced_itself_is_named(pool: Pool, namespace: str, tokens: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    pool.store.remove([filled.shards[0].descriptor_key()], force=True)
    pool.store.remove([filled.key(0, block) for block in range(3)], force=True)
    found = only(pool, tokens, namespace, status=1)
    assert found["hit_tokens"] == 0
    assert "heads from 0 of 2" in found["never_announced"][0]


@pytest.mark.parametrize(
    ("options", "word"), [(["--hash-seed", "8"], "PYTHONHASHSEED"), (["--salt", "x"], "another hash")]
)
def test_h2_another_hash_finds_nothing_and_says_so(
    pool: Pool, namespace: str, tokens: str, options: list[str], word: str
) -> None:
    fill(pool, namespace, TOKENS)
    found = only(pool, tokens, namespace, *options, status=1)
    assert found["hit_tokens"] == 0
    assert word in found["why"]


def test_deployments_are_told_apart(pool: Pool, namespace: str, tokens: str) -> None:
    fill(pool, namespace, TOKENS, tp_size=2)
    fill(pool, namespace, TOKENS[:4], tp_size=1)
    fill(pool, namespace, TOKENS[:8], model="another")
    found = pool.ask("explain", "--tokens-file", tokens, "--namespace", namespace)["deployments"]
    assert sorted(d["hit_tokens"] for d in found) == [4, 8, 12]


@pytest.mark.parametrize("text", ["", "[]", "1 two 3", "[1, -2]", "[1.5]", '["1"]', "[true]", "[" * 50_000, "\x00"])
def test_a_wrong_file_is_named(pool: Pool, tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    assert str(path) in pool.ask("explain", "--tokens-file", str(path), status=2)["error"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ([], "give one of"),
        (["--tokens-file", "/nonexistent"], "cannot be read"),
        (["--prompt-file", "/nonexistent"], "cannot be read"),
        (["--tokens-file", "TOKENS", "--hash-algorithm", "md5"], "'md5' is not known"),
        (["--tokens-file", "TOKENS", "--hash-block-size", "3"], "does not divide"),
        (["--tokens-file", "TOKENS", "--namespace", "nobody"], "nothing of namespace 'nobody'"),
    ],
)
def test_wrong_options_are_named(pool: Pool, namespace: str, tokens: str, options: list[str], word: str) -> None:
    fill(pool, namespace, TOKENS)
    words = ["--namespace", namespace, *(tokens if option == "TOKENS" else option for option in options)]
    assert word in pool.ask("explain", *words, status=2)["error"]


def test_without_a_seed_nothing_can_be_said(pool: Pool, tokens: str) -> None:
    assert "--hash-seed" in pool.ask("explain", "--tokens-file", tokens, "--hash-seed", "", status=2)["error"]


def test_a_namespace_without_readable_descriptors(pool: Pool, namespace: str, tokens: str) -> None:
    filled = fill(pool, namespace, TOKENS)
    for shard in filled.shards:
        pool.overwrite(shard.descriptor_key(), b"{}")
    error = pool.ask("explain", "--tokens-file", tokens, "--namespace", namespace, status=2)["error"]
    assert "no readable descriptor" in error
