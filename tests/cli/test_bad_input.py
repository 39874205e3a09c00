"""Bad input to every command: a message that names it, status 2, one JSON document on `--json`, nothing changed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

import kvpool_connector.cli.app as app_module
from kvpool_connector.cli.app import app
from kvpool_connector.cli.progress import ProgressBar
from tests.cli.pool import Pool, fill

TOKENS = list(range(12))
COMMANDS = sorted(command.name or "" for command in app.registered_commands)
WRONG_WORDS = {
    "bench": ["--blocks", "0"],
    "clear": [],
    "doctor": ["--ranks", "many"],
    "explain": ["--hash-block-size", "-1"],
    "ls": ["--limit", "-1"],
    "stat": ["surplus"],
    "verify": ["--what"],
}
"""What the parser of options refuses, by command; `clear` without a namespace."""
WRONG_INPUT = {
    "bench": (["--model", "gpt-2"], "'gpt-2' is not listed"),
    "clear": (["--namespace", "nobody", "--yes"], "nothing of namespace 'nobody'"),
    "doctor": (["--extra-config", '{"kv_head_splits": "head"}'], "nearest known one is 'kv_head_split'"),
    "explain": (["--tokens-file", "/no/such/file"], "/no/such/file cannot be read"),
    "ls": (["--endpoint", "here"], "'here' is not an address"),
    "stat": (["--config", "/no/such/file"], "/no/such/file: not readable"),
    "verify": (["nonsense"], "is not a key"),
}


def test_every_command_is_held() -> None:
    assert list(WRONG_WORDS) == list(WRONG_INPUT) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_options_that_cannot_be_read_are_errors_like_others(pool: Pool, command: str) -> None:
    before = pool.keys()
    words = [command, *WRONG_WORDS[command]]
    error = pool.ask(*words, status=2)["error"]
    assert f"`kvpool {command} --help`" in error
    result = pool.run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error ")
    assert result.stderr.split()[1:] == error.split()
    assert pool.keys() == before


@pytest.mark.parametrize("command", COMMANDS)
def test_input_that_is_wrong_is_named(pool: Pool, command: str) -> None:
    words, said = WRONG_INPUT[command]
    before = pool.keys()
    assert said in pool.ask(command, *words, status=2)["error"]
    result = pool.run(command, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert pool.keys() == before


def test_an_unknown_command_is_named(pool: Pool) -> None:
    assert "'lss'" in pool.ask("lss", status=2)["error"]
    assert "ls" in pool.run().output


def test_who_does_not_answer_has_said_no(pool: Pool, namespace: str) -> None:
    fill(pool, namespace, TOKENS)
    before = pool.keys()
    result = pool.run("clear", "--namespace", namespace)
    assert result.exit_code == 2
    assert "nothing was removed" in result.stderr
    assert pool.keys() == before


@pytest.mark.parametrize(("command", "work"), [(["verify"], "comparing"), (["clear", "--yes", "--force"], "removing")])
def test_long_work_tells_how_far_it_is(pool: Pool, namespace: str, command: list[str], work: str) -> None:
    fill(pool, namespace, TOKENS)
    told: list[tuple[str, int, int]] = []
    pool.ask(*command, "--namespace", namespace, tell=lambda *words: told.append(words))
    of_this = [(done, total) for what, done, total in told if what == work]
    assert of_this[-1][0] == of_this[-1][1] >= 6
    assert of_this == sorted(of_this)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_drawn_on_a_terminal_alone(terminal: bool) -> None:
    shown = io.StringIO()
    bar = ProgressBar(Console(file=shown, force_terminal=terminal))
    bar.tell("comparing", 3, 6)
    bar.close()
    assert ("comparing" in shown.getvalue()) == terminal


def test_bars_are_gone_before_the_answer_is_printed(
    pool: Pool, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wipe off what was printed under them."""
    fill(pool, namespace, TOKENS)
    shown = io.StringIO()
    order: list[str] = []

    class Bar(ProgressBar):
        def __init__(self) -> None:
            super().__init__(Console(file=shown, force_terminal=True))

        def close(self) -> None:
            order.append("gone")
            super().close()

    monkeypatch.setattr("kvpool_connector.cli.app.ProgressBar", Bar)
    for name in ("show", "show_error"):
        right = getattr(app_module, name)
        said = lambda *words, right=right, **how: order.append("said") or right(*words, **how)  # noqa: E731
        monkeypatch.setattr(f"kvpool_connector.cli.app.{name}", said)
    pool.run("verify", "--namespace", namespace)
    assert "comparing" in shown.getvalue()
    pool.run("clear", "--namespace", namespace, "--yes", "--master", "127.0.0.1:1")
    assert order == ["gone", "said", "gone"] * 2


def test_bench_draws_a_picture_or_says_at_once_that_it_cannot(pool: Pool, tmp_path: Path) -> None:
    words = ["bench", "--model", "qwen3-8b", "--blocks", "1", "--repeats", "1", "--tensor-parallel-size", "8"]
    picture = tmp_path / "speed.svg"
    found = pool.ask(*words, "--pipeline-parallel-size", "5", "--plot", str(picture))
    # Of 36 layers in five stages the largest has eight.
    assert found["object_bytes"] == 8 * 2 * 128 * 128 * 2
    assert picture.read_text().count("<rect") == 1 + 2 * len(found["bytes_per_s"])
    assert "connector, packed, load" in picture.read_text()
    told: list[object] = []
    error = pool.ask(*words, "--plot", str(tmp_path / "no" / "p.svg"), status=2, tell=lambda *w: told.append(w))[
        "error"
    ]
    assert "p.svg cannot be written" in error
    assert not told
    assert "without any of its layers" in pool.ask(*words, "--pipeline-parallel-size", "37", status=2)["error"]


def test_the_documents_are_json_that_any_program_reads(pool: Pool, namespace: str) -> None:
    fill(pool, namespace, TOKENS)
    for command in (["ls"], ["stat"], ["verify"], ["clear", "--yes", "--force"]):
        result = pool.run(*command, "--namespace", namespace, "--json")
        json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
