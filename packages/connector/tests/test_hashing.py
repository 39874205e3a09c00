"""Engines whose block hashes differ say so at start, with what to set."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from stores import DictStore
from test_worker import Rig

from kvpool_connector.contract.status import Status
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.hashing import SECRET, Hashing, check_hashing, hashing_key, read_hashing
from kvpool_connector.metadata import GroupBlocks, SaveJob, StepMetadata

ZERO = Hashing("sha256", "0", "aa")


def others(own: Hashing, found: Hashing, caplog: pytest.LogCaptureFixture) -> str:
    """What an engine logs that starts after another; empty when all is well."""
    store = DictStore()
    assert check_hashing(found, store, "n", 0)
    caplog.clear()
    well = check_hashing(own, store, "n", 0)
    assert well == (not caplog.records)
    assert read_hashing(store, "n", 0) == found
    return caplog.text


def test_b11_engines_that_agree_have_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    assert others(ZERO, ZERO, caplog) == ""
    # One that sets what the other has by default.
    assert others(dataclasses.replace(ZERO, seed=None), ZERO, caplog) == ""


@pytest.mark.parametrize(
    ("own", "remedy"),
    [
        (Hashing("sha256", "7", "bb"), "with PYTHONHASHSEED=0 and with --prefix-caching-hash-algo sha256;"),
        (Hashing("sha256", None, "bb"), "with PYTHONHASHSEED=0 and with --prefix-caching-hash-algo sha256;"),
        (Hashing("sha256_cbor", "0", "bb"), "with PYTHONHASHSEED=0 and with --prefix-caching-hash-algo sha256;"),
        (Hashing("sha256", "0", "bb"), "the same versions of vLLM and Python"),
    ],
)
def test_b11_an_engine_that_would_never_hit_says_what_to_set(
    own: Hashing, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = others(own, ZERO, caplog)
    assert "event=other_hashes" in text
    assert remedy in text
    assert "kvpool clear --namespace n" in text


def test_b11_a_default_seed_is_the_remedy_too(caplog: pytest.LogCaptureFixture) -> None:
    text = others(ZERO, Hashing("sha256", None, "bb"), caplog)
    assert "Start this engine without PYTHONHASHSEED and with --prefix-caching-hash-algo sha256;" in text


def test_b11_an_engine_that_draws_its_hashes_says_so_and_names_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = DictStore()
    assert not check_hashing(Hashing("xxhash", None, ""), store, "n", 0)
    assert "event=random_hashes" in caplog.text
    assert "PYTHONHASHSEED=0" in caplog.text
    assert store.objects == {}


def test_the_seed_of_an_algorithm_with_collisions_is_not_shown() -> None:
    store = DictStore()
    check_hashing(Hashing("xxhash_cbor", "4711", "aa"), store, "n", 0)
    assert b"4711" not in store.objects[hashing_key("n", 0)]
    assert read_hashing(store, "n", 0) == Hashing("xxhash_cbor", SECRET, "aa")
    assert check_hashing(Hashing("xxhash_cbor", "4711", "aa"), store, "n", 0)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"1", b'{"algorithm": "a", "seed": 0, "sample": "b"}', b"\xff", b'{"a": 1}']
)
def test_what_does_not_say_it_is_passed_over(text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = DictStore()
    store.objects[hashing_key("n", 0)] = text
    assert read_hashing(store, "n", 0) is None
    assert check_hashing(ZERO, store, "n", 0)
    assert not caplog.records
    assert store.objects[hashing_key("n", 0)] == text


def test_a_store_that_is_down_says_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore()
    monkeypatch.setattr(store, "write", lambda key, value, pinned: Status.UNAVAILABLE)
    monkeypatch.setattr(store, "read", lambda key: (Status.UNAVAILABLE, b""))
    assert check_hashing(ZERO, store, "n", 0)
    assert not caplog.records


def test_b11_a_worker_compares_at_start_and_after_a_reset(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    store = DictStore()
    both = Topology(1, 2)
    Rig(store, both, Rank(), hashing=ZERO)
    assert read_hashing(store, "test", 0) == ZERO
    del store.objects[hashing_key("test", 0)]
    Rig(store, both, Rank(tp=1), hashing=ZERO)
    assert hashing_key("test", 0) not in store.objects, "one worker of an engine says it"
    assert not caplog.records
    other = Rig(store, both, Rank(), hashing=dataclasses.replace(ZERO, seed="1", sample="bb"))
    Rig(store, both, Rank(), hashing=ZERO)
    assert caplog.text.count("event=other_hashes") == 1
    job = SaveJob("r", (GroupBlocks(0, (1,), (b"h",)),), "", False, 1)
    step = StepMetadata((), (job,), frozenset())
    other.worker.begin_step(step)
    other.worker.end_step(step)
    assert other.worker.drain(30)
    other.worker.close()
    found = read_hashing(store, "test", 1)
    assert found is not None
    assert found.sample == "bb"
