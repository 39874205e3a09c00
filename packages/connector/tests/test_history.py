"""An engine can be asked, on its machine and by its user, what it decided about a request and why."""

from __future__ import annotations

import os
import random
import socket
import socketserver
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_scheduler import FULL, Bench

from kvpool_connector.contract.status import Status
from kvpool_connector.history import Decision, History, ask_engines, serve_history
from kvpool_connector.local_socket import LocalServer
from kvpool_connector.tracker import GroupRule


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def history() -> History:
    return History(3)


@pytest.fixture
def server(history: History) -> Iterator[LocalServer]:
    served = serve_history(history)
    assert served is not None
    yield served
    served.close()


def decision(request_id: str, **more: int) -> Decision:
    return Decision(request_id, 0.0, "hit", 64, 0, 48, more.pop("hit_tokens", 48), **more)


def test_h2_the_first_missing_block_is_named_with_its_keys(history: History) -> None:
    bench = Bench(tp=2, heads=2, history=history)
    view = bench.view(70)
    bench.store(view, range(4))
    gone = bench.keys(view, 0, 2)[1]
    bench.lookup.present.discard(gone)
    assert bench.scheduler.num_matched_tokens(view, 0)[0] == 32
    (found,) = history.find("r")
    assert (found.result, found.num_tokens, found.most_tokens, found.hit_tokens) == ("hit", 70, 64, 32)
    assert (found.group, found.block, found.missing_keys, found.block_keys) == (0, 2, (gone,), 2)
    bench.scheduler.allocated(view, [[0, 1, 2, 3, 4]], 32)
    assert (found.loaded_tokens, found.load_failed) == (32, False)
    bench.scheduler.loads_failed(["r"])
    assert found.load_failed


def test_a_block_of_a_later_group_is_named_by_its_own_keys(history: History) -> None:
    bench = Bench([FULL, GroupRule(32)], history=history)
    view = bench.view(130)
    bench.store(view, range(8), group=0)
    bench.store(view, [0, 1, 3], group=1)
    assert bench.scheduler.num_matched_tokens(view, 32)[0] == 32
    (found,) = history.find("r")
    assert (found.group, found.block, list(found.missing_keys)) == (1, 2, bench.keys(view, 1, 2))


def test_what_was_not_asked_is_told_from_what_was_not_answered(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(history=history)
    bench.scheduler.num_matched_tokens(bench.view(16, "short"), 0)
    monkeypatch.setattr(bench.lookup, "exist", lambda keys: [Status.UNAVAILABLE] * len(keys))
    bench.scheduler.num_matched_tokens(bench.view(70, "down"), 0)
    assert [history.find(r)[0].result for r in ("short", "down")] == ["short", "unanswered"]


@pytest.mark.parametrize("seed", range(30))
def test_holes_anywhere_give_the_boundary_that_trying_all_gives(seed: int) -> None:
    chance = random.Random(seed)
    rules = [GroupRule(16 * chance.choice([1, 2, 4]), chance.choice([None, 15, 40])) for _ in range(2)]
    bench = Bench(rules)
    bench.unit = 16
    bench.scheduler._hash_block_size = 16
    view = bench.view(16 * 40)
    present = [
        {i for i in range(16 * 40 // rule.block_size) if chance.random() < chance.choice([0.7, 0.95])} for rule in rules
    ]
    for group, blocks in enumerate(present):
        bench.store(view, sorted(blocks), group)
    step = max(rule.block_size for rule in rules)
    tried = [
        boundary
        for boundary in range(step, view.num_tokens, step)
        if all(
            set(range(rule.first_needed(boundary), boundary // rule.block_size)) <= blocks
            for rule, blocks in zip(rules, present, strict=True)
        )
    ]
    found = bench.scheduler.num_matched_tokens(view, 0)[0]
    assert found == max(tried, default=0), f"seed {seed}: {rules}"


def test_the_last_requests_are_kept_and_no_more(history: History) -> None:
    for name in ("a", "b", "c", "a", "d"):
        history.looked_up(decision(name))
    assert [len(history.find(name)) for name in "abcd"] == [1, 0, 1, 1]
    assert len(history.find("")) == 3


def test_an_engine_answers_by_the_front_of_the_id(history: History, server: LocalServer) -> None:
    history.looked_up(decision("cmpl-17-0-3f", block=2, missing_keys=("k",), block_keys=2))
    assert ask_engines("cmpl-17") == (1, history.find("cmpl-17-0-3f"))
    assert ask_engines("cmpl-18") == (1, [])


def test_only_the_owner_may_ask(server: LocalServer, tmp_path: Path) -> None:
    (path,) = (tmp_path / f"kvpool-{os.getuid()}").iterdir()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("answer", [b"", b"\xc1", b"\x91\x01"])
def test_an_answer_out_of_form_is_no_engine(answer: bytes, server: LocalServer, tmp_path: Path) -> None:
    other = LocalServer(tmp_path / f"kvpool-{os.getuid()}" / "requests-0", lambda message: answer, "other")
    assert ask_engines("r") == (1, [])
    other.close()


def test_what_a_killed_engine_left_is_cleared_away(server: LocalServer, history: History, tmp_path: Path) -> None:
    directory = tmp_path / f"kvpool-{os.getuid()}"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "requests-dead"))
    assert ask_engines("r") == (1, [])
    another = serve_history(history)
    assert another is not None
    assert len(list(directory.iterdir())) == 2
    another.close()


def test_a_server_that_does_not_listen_yet_is_not_taken_for_dead(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines that start at once: the one that looks for the dead must not see the other half made."""
    seen: list[str] = []
    listen = socketserver.ThreadingUnixStreamServer.server_activate

    def activate(server: socketserver.ThreadingUnixStreamServer) -> None:
        seen.extend(path.name for path in (tmp_path / f"kvpool-{os.getuid()}").glob("requests-*"))
        listen(server)

    monkeypatch.setattr(socketserver.ThreadingUnixStreamServer, "server_activate", activate)
    server = serve_history(history)
    assert server is not None
    assert seen == []
    assert ask_engines("r") == (1, [])
    server.close()


def test_without_a_place_for_the_socket_the_engine_serves_on(
    history: History, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    assert serve_history(history) is None
    assert "event=no_history" in caplog.text
