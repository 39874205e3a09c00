"""What the documentation says can be run runs, and its links lead somewhere."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvpool_connector.cli.app import app
from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_simulator.capacity.__main__ import parser as capacity_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every code block in a language."""
    found = []
    for page in PAGES:
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
            if kind == language:
                found.append((page.relative_to(ROOT).as_posix(), text))
    return found


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_runs(page: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "test_block.py"
    path.write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        *(["-m", "pytest", "-q", "-p", "no:cacheprovider"] if "pytest" in text else []),
        str(path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


KINDS = {"python", "json", "console", "yaml"}
"""Languages of code blocks that a test runs or parses; `text` is no code."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_code_block_is_held_by_a_test(page: Path) -> None:
    fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert fences[1::2] == [""] * (len(fences) // 2), "a block that does not end"
    assert set(fences[::2]) <= KINDS | {"text"}


def test_the_toy_backend_is_judged(tmp_path: Path) -> None:
    (text,) = [text for page, text in blocks("python") if page == "docs/write-a-backend.md"]
    right = "return Status.CORRUPT"
    assert text.count(right) == 1
    path = tmp_path / "test_wrong.py"
    path.write_text(text.replace(right, "return Status.OK"), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "test_another_size_is_never_ok" in done.stdout


@pytest.mark.parametrize(("page", "text"), blocks("json"))
def test_json_is_what_the_connector_takes(page: str, text: str) -> None:
    StoreSettings.model_validate(json.loads(text))


@pytest.mark.parametrize(("page", "text"), blocks("console"))
def test_commands_parse_and_their_settings_are_known(page: str, text: str) -> None:
    words = shlex.split(text)
    assert words
    for word, value in itertools.pairwise(words):
        if word == "--kv-transfer-config":
            for connector in connectors(json.loads(value)):
                if connector.get("kv_connector_module_path") == "kvpool_connector.vllm":
                    PoolSettings.from_extra_config(connector["kv_connector_extra_config"])


def commands(program: str) -> list[list[str]]:
    """Every command line of a program in the documentation, settings of the environment in front of it left out."""
    found = []
    for _, text in blocks("console"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if line.startswith(program) else []
            found += [words[1:]] if words[:1] == [program] else []
    return found


@pytest.mark.parametrize("words", commands("kvpool"), ids=" ".join)
def test_commands_of_kvpool_take_their_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pool each fails, but not for its options."""
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    words = ["/dev/null" if word == "tokens.json" else word for word in words]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "lists what it takes" not in result.stderr


def test_commands_of_capacity_take_their_options() -> None:
    found = commands("kvpool-capacity")
    assert len(found) >= 2
    for words in found:
        capacity_parser().parse_args(words)


def mooncake_flags() -> set[str]:
    """The flags of the real master; empty where it cannot be run."""
    program = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        return set()
    done = subprocess.run([program, "--helpfull"], capture_output=True, text=True, timeout=60, check=False)
    return set(re.findall(r"^ +-(\w+) \(", done.stdout + done.stderr, re.MULTILINE))


def test_flags_of_the_master_are_its_own() -> None:
    known = mooncake_flags()
    if not known:
        pytest.skip("mooncake_master cannot be run here")
    used = {word[2:].split("=")[0] for words in commands("mooncake_master") for word in words if word[:2] == "--"}
    for _, text in blocks("yaml"):
        used |= {word[2:] for words in manifests(text) for word in words if word[:2] == "--"}
    assert {"rpc_address", "default_kv_lease_ttl"} <= used
    assert used <= known


def manifests(text: str) -> Iterator[list[str]]:
    """Commands of the containers in a file for Kubernetes."""
    for document in yaml.safe_load_all(text):
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        yield from (container["command"] for container in pod.get("containers", ()))


def test_files_for_kubernetes_hold_what_the_connector_takes() -> None:
    documents = [document for _, text in blocks("yaml") for document in yaml.safe_load_all(text)]
    (found,) = [document["data"]["mooncake.json"] for document in documents if document["kind"] == "ConfigMap"]
    settings = StoreSettings.model_validate(json.loads(found))
    (service,) = [document for document in documents if document["kind"] == "Service"]
    ports = {port["port"] for port in service["spec"]["ports"]}
    host, _, port = settings.master_server_address.rpartition(":")
    assert (host, int(port) in ports) == (service["metadata"]["name"], True)


def connectors(configuration: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A transfer configuration and its children."""
    yield configuration
    for child in configuration["kv_connector_extra_config"].get("connectors", ()):
        yield from connectors(child)


def test_every_event_in_the_log_is_explained() -> None:
    sources = ROOT.glob("packages/connector/src/**/*.py")
    said = {event for source in sources for event in re.findall(r"event=(\w+)", source.read_text(encoding="utf-8"))}
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    explained = {
        event for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for event in re.findall(r"`(\w+)`", row)
    }
    assert said == explained


def problems() -> set[str]:
    """What the connector may say is wrong with a layout: the fixed text of each refusal."""
    text = (ROOT / "packages/connector/src/kvpool_connector/registration.py").read_text(encoding="utf-8")
    assert text.count("LayoutError(") == 1, "every refusal is made by _refusal, and so in one form"
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    refusals = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "_refusal"]
    return {ast.literal_eval(call.args[1]) for call in refusals}


def test_every_refusal_of_a_layout_is_explained() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    rows = page[page.index("### A layout is refused") : page.index("### Ranks disagree")]
    explained = set(re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE)) - {"what is wrong"}
    elsewhere = {"its blocks do not divide into hashed ones": "scheduler.py"}
    assert explained == problems() | set(elsewhere)
    said = {"disagree about KV cache group": "contract/shards.py", **elsewhere}
    for words, name in said.items():
        assert words in page
        assert words in (ROOT / "packages/connector/src/kvpool_connector" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_claim_is_in_the_table() -> None:
    module = ast.parse((ROOT / "tests/twin/test_claims.py").read_text(encoding="utf-8"))
    claims = {
        tuple(ast.literal_eval(argument) for argument in decorator.args)
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    }
    assert len(claims) >= 50
    text = (ROOT / "docs/mooncake-semantics.md").read_text(encoding="utf-8")
    assert [claim for claim in claims if f"| `{claim[0]}` | {claim[1]} |" not in text] == []
