"""`explain --request-id`: what an engine on this machine says of a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_connector.history import Decision, History, serve_history
from tests.cli.pool import Pool


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def history() -> Iterator[History]:
    kept = History(10)
    server = serve_history(kept)
    assert server is not None
    yield kept
    server.close()


def test_no_engine_and_no_such_request_are_errors(pool: Pool, tmp_path: Path) -> None:
    assert "no engine of this user answers" in pool.ask("explain", "--request-id", "r", status=2)["error"]
    server = serve_history(History(1))
    assert server is not None
    assert "1 engines answer and none remembers 'r'" in pool.ask("explain", "--request-id", "r", status=2)["error"]
    server.close()


@pytest.mark.parametrize(
    ("decision", "status", "why"),
    [
        (Decision("r", 0, "hit", 70, 0, 64, 64, loaded_tokens=64), 0, "All of the 64 tokens"),
        (
            Decision("r", 0, "hit", 70, 0, 64, 32, 0, 0, 2, ("k1",), 2),
            1,
            "Block 2 of group 0 was there in part; 1 of its 2",
        ),
        (Decision("r", 0, "miss", 70, 0, 64, 0, 0, 1, 0, ("k0",), 1), 1, "Block 0 of group 1 was not there"),
        (Decision("r", 0, "hit", 70, 0, 64, 64, loaded_tokens=64, load_failed=True), 1, "did not load"),
        (Decision("r", 0, "unanswered", 70, 0, 64, 0), 1, "event=store_outage"),
        (Decision("r", 0, "below", 70, 0, 64, 32, 48), 1, "The pool had 32 tokens: fewer than the 48"),
        (Decision("r", 0, "below", 70, 0, 64, 0, 80), 1, "At most 64 were to be had: fewer than the 80"),
        (Decision("r", 0, "short", 70, 64, 64, 64), 0, "the pool was not asked"),
    ],
)
def test_the_reason_is_told(pool: Pool, history: History, decision: Decision, status: int, why: str) -> None:
    history.looked_up(decision)
    answer = pool.ask("explain", "--request-id", "r", status=status)
    (found,) = answer["requests"]
    assert why in found["why"]
    assert found["missing_keys"] == list(decision.missing_keys)


def test_one_question_at_a_time(pool: Pool, tmp_path: Path) -> None:
    asked = ("explain", "--request-id", "r", "--tokens-file", str(tmp_path / "t"))
    assert "give one of" in pool.ask(*asked, status=2)["error"]
