"""Traces are read strictly; pools evict as the simulated store does; replays count what can be counted by hand."""

from __future__ import annotations

import ctypes
import json
import random
import time
import xml.dom.minidom
from pathlib import Path

import pytest

from kvpool_connector.contract.keys import parse_key
from kvpool_simulator.capacity import Fleet, Request, SizedPool, TraceError, read_trace, replay, sample_trace
from kvpool_simulator.capacity.__main__ import main
from kvpool_simulator.capacity.replay import Keys, bytes_per_token
from kvpool_simulator.clock import VirtualClock
from kvpool_simulator.store import MasterOptions, MooncakeDistributedStore, ReplicateConfig, SimulatedMaster

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'
MIB = 1 << 20
BIG = 1 << 50


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "line 3"),
        ("[]", "expected a JSON object"),
        ("[" * 50_000, "line 3"),
        (GOOD.replace("600", "-1"), "input_length is -1"),
        (GOOD.replace("600", '"600"'), "input_length is '600'"),
        (GOOD.replace("600", "1e400"), "input_length is inf"),
        (GOOD.replace("600", "NaN"), "input_length is nan"),
        (GOOD.replace('"timestamp": 0', '"time": 0'), "timestamp is None"),
        (GOOD.replace("[1, 2]", "[1, true]"), "hash_ids"),
        (GOOD.replace("[1, 2]", "[1, -2]"), "hash_ids"),
        (GOOD.replace("600", "1536"), "2 hash_ids for 1536 tokens"),
        ("\x00", "line 3"),
    ],
)
def test_a_broken_line_is_named_by_its_number(
    tmp_path: Path, line: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(TraceError, match="line 3") as caught:
        read_trace(path)
    assert word in str(caught.value)
    assert main([str(path)]) == 2
    said = capsys.readouterr()
    assert "line 3" in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "nothing"),
        (["empty"], "has no requests"),
        (["broken"], "line 2"),
        (["/dev/zero"], "line 1: more than 16777216 characters"),
        (["good", "--pool-size", "huge"], "'huge' is not a size"),
        (["good", "--instances", "0"], "'0'; expected a whole number"),
        (["good", "--model", "gpt-2"], "invalid choice: 'gpt-2'"),
        (["good", "--sample", "5"], "is there already"),
        (["good", "--plot", "no/such/place.svg"], "no/such/place.svg cannot be written"),
        ([], "name a trace"),
        (["good", "--what"], "unrecognized arguments: --what"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_named_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
    as_json: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"empty": "\n", "good": GOOD + "\n", "broken": f"{GOOD}\nbroken\n"}
    for name, text in files.items():
        Path(name).write_text(text)
    assert main([*words, "--json"] if as_json else words) == 2
    out, err = capsys.readouterr()
    assert said in (json.loads(out)["error"] if as_json else err)
    assert (err if as_json else out) == ""
    assert {path.name: path.read_text() for path in Path().iterdir()} == files


@pytest.mark.parametrize("seed", range(6))
def test_a_pool_evicts_as_the_simulated_store_does(seed: int) -> None:
    """One put or lookup every 20 ms; the store evicts up to 11 ms later, and no lease ends in between."""
    dice, clock, lease_s = random.Random(seed), VirtualClock(), 0.515
    options = MasterOptions(default_kv_lease_ttl_ms=515)
    with SimulatedMaster("127.0.0.1:50077", clock=clock, options=options, profile="tcp") as master:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 0, "tcp", "", master.address) == 0
        pool = SizedPool(64 * MIB, MIB, lease_s)
        source = ctypes.create_string_buffer(MIB)
        store.register_buffer(ctypes.addressof(source), MIB)
        for step in range(600):
            key = f"k{dice.randrange(30 + step // 4)}"
            now = clock.now()
            if dice.random() < 0.5:
                assert (store.batch_is_exist([key]) == [1]) == pool.exist(key, now), f"step {step}"
            else:
                address = [[ctypes.addressof(source)]]
                codes = store.batch_put_from_multi_buffers([key], address, [[MIB]], ReplicateConfig())
                assert (codes == [0]) == pool.put(key, now), f"step {step}"
            clock.advance(0.011)
            store.batch_is_exist(["nothing"])
            clock.advance(0.009)
        left = set(master.service.master.keys())
        assert left == {f"k{i}" for i in range(200) if pool.exist(f"k{i}", clock.now())}
        assert pool.num_evicted > 50
        store.close()


def test_everything_leased_is_refused() -> None:
    pool = SizedPool(4, 1, lease_s=10)
    for key in "abc":
        assert pool.put(key, 0)
        assert pool.exist(key, 0)
    assert not pool.put("d", 1)
    assert (pool.num_refused, len(pool)) == (1, 3)
    assert pool.put("d", 11)
    assert not pool.exist("a", 11)


def request(second: float, ids: list[int], tokens: int | None = None) -> Request:
    return Request(int(second * 1000), len(ids) * 512 if tokens is None else tokens, 1, tuple(ids))


def test_tokens_are_counted_by_where_they_came_from() -> None:
    requests = [request(0, [1, 2, 3]), request(100, [1, 2, 3]), request(200, [1, 2, 9, 10], 1600)]
    one = replay(requests, Fleet("qwen3-32b", BIG, 1))
    # The second computes one token of its last block, so that block is not used; the third has 64 tokens of a fourth.
    assert (one.local_tokens, one.pool_tokens, one.prompt_tokens) == (0, 1024 + 1024, 1536 + 1536 + 1600)
    block = bytes_per_token("qwen3-32b") * 512
    assert one.loaded_bytes == 4 * block
    assert one.saved_bytes == (3 + 1 + 1) * block
    local = replay(requests, Fleet("qwen3-32b", BIG, 1, local_bytes=BIG))
    assert (local.local_tokens, local.pool_tokens) == (2048, 0)
    two = replay(requests, Fleet("qwen3-32b", BIG, 2, local_bytes=BIG))
    assert (two.local_tokens, two.pool_tokens) == (1024, 1024)


def test_a_block_is_hit_only_after_it_was_computed() -> None:
    requests = [request(0, [1, 2, 3, 4]), request(1, [1, 2, 3, 4])]
    slow = replay(requests, Fleet("qwen3-32b", BIG, 2, prefill_tokens_per_s=1000))
    fast = replay(requests, Fleet("qwen3-32b", BIG, 2, prefill_tokens_per_s=10_000))
    assert (slow.pool_tokens, fast.pool_tokens) == (0, 3 * 512)


def test_bytes_of_a_token_are_the_models() -> None:
    assert bytes_per_token("deepseek-v3.2") == 61 * (512 + 64 + 128) * 2
    assert bytes_per_token("qwen3-32b") == 64 * 2 * 8 * 128 * 2


def test_keys_are_real() -> None:
    first, second = (Keys("qwen3-32b").of([i])[0] for i in (1, 2))
    assert parse_key(first) != parse_key(second)
    assert Keys("deepseek-v3").of([1]) != [first]


def test_a_larger_pool_hits_no_less_and_evicts_no_more() -> None:
    requests = list(sample_trace(1500, seed=3))
    outcomes = [replay(requests, Fleet("deepseek-v3.2", size << 30, 2)) for size in (4, 32, 256, 4096)]
    rates = [outcome.hit_rate for outcome in outcomes]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert outcomes[0].evicted > outcomes[-1].evicted == 0


def test_the_command_writes_table_document_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "plot.svg"
    assert main([str(trace), "--sample", "200", "--seed", "5"]) == 0
    again = tmp_path / "again.jsonl"
    assert main([str(again), "--sample", "200", "--seed", "5"]) == 0
    assert trace.read_text() == again.read_text()
    assert len(read_trace(trace)) == 200
    options = ["--pool-size", "1GB", "--pool-size", "64GB", "--instances", "1", "--instances", "2"]
    assert main([str(trace), *options, "--plot", str(picture)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    assert len(xml.dom.minidom.parse(str(picture)).getElementsByTagName("polyline")) == 2
    assert main([str(trace), *options, "--json"]) == 0
    assert [row["fleet"]["instances"] for row in json.loads(capsys.readouterr().out)] == [1, 1, 2, 2]


def test_12_000_requests_take_less_than_a_minute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seconds, in fact; the bound is what an operator may count on."""
    path = tmp_path / "trace.jsonl"
    start = time.monotonic()
    assert main([str(path), "--sample", "12000"]) == 0
    assert main([str(path), "--pool-size", "256GB", "--instances", "4", "--json"]) == 0
    assert time.monotonic() - start < 60
    (found,) = json.loads(capsys.readouterr().out)
    assert found["num_requests"] == 12_000
    assert len(path.read_text(encoding="utf-8").splitlines()) == 12_000
