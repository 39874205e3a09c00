"""The checks of `nox -s layers` can fail: each kind of forbidden import, planted into a copy, is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.check_edges import violations

ROOT = Path(__file__).parents[2]


def plant(root: Path, name: str, line: str) -> None:
    """Append a line to a source file under `root`, which is made when missing; `name` begins with the import name."""
    package = name.split("/")[0].removeprefix("kvpool_")
    path = root / "packages" / package / "src" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("kvpool_connector/worker.py", "import vllm", "imports vllm; only kvpool_connector/vllm.py may"),
        (
            "kvpool_connector/vllm.py",
            "import mooncake.store",
            "imports mooncake; only kvpool_connector/mooncake.py may",
        ),
        ("kvpool_simulator/store/client.py", "from mooncake import store", "imports mooncake; only"),
        (
            "kvpool_connector/host.py",
            "def late():\n    import torch_npu",
            "imports torch_npu; only kvpool_connector/ascend.py may",
        ),
        ("kvpool_conformance/backend.py", "importlib.import_module('vllm.config')", "imports vllm; only"),
        ("kvpool_connector/planner.py", "from torch import Tensor", "imports torch; the connector's core"),
        ("kvpool_connector/contract/keys.py", "import numpy as np", "imports numpy; the contract is standard library"),
    ],
)
def test_a_foreign_import_is_seen(tmp_path: Path, name: str, line: str, message: str) -> None:
    plant(tmp_path, name, line)
    (found,) = violations(tmp_path)
    assert found.startswith(f"{name} {message}")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("kvpool_connector/vllm.py", "import vllm, torch"),
        ("kvpool_connector/mooncake.py", "from mooncake.store import MooncakeDistributedStore"),
        ("kvpool_connector/ascend.py", "import torch, torch_npu"),
        ("kvpool_connector/vllm.py", "from .mooncake import MooncakeStore"),
        ("kvpool_simulator/device/arena.py", "import torch"),
        (
            "kvpool_connector/contract/keys.py",
            "import hashlib\nfrom kvpool_connector.contract.errors import KeyFormatError",
        ),
    ],
)
def test_what_is_allowed_is_not_seen(tmp_path: Path, name: str, line: str) -> None:
    plant(tmp_path, name, line)
    assert list(violations(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "line", "contract"),
    [
        (
            "kvpool_connector/config.py",
            "import kvpool_simulator",
            "The connector knows neither simulator nor conformance",
        ),
        ("kvpool_simulator/clock.py", "import kvpool_conformance", "Simulator and conformance never meet"),
        (
            "kvpool_simulator/clock.py",
            "from kvpool_connector.counters import Counters",
            "Simulator and conformance see the contract alone",
        ),
        (
            "kvpool_conformance/cases.py",
            "from kvpool_connector import planner",
            "Simulator and conformance see the contract alone",
        ),
        ("kvpool_connector/transfer.py", "import kvpool_connector.worker", "Layers of the connector"),
        ("kvpool_connector/homeless.py", "", "Layers of the connector"),
    ],
)
def test_a_wrong_direction_is_seen(tmp_path: Path, name: str, line: str, contract: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for source in ROOT.glob("packages/*/src"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, tmp_path / source.relative_to(ROOT), ignore=ignored)
    plant(tmp_path, name, line)
    copies = os.pathsep.join(str(path) for path in sorted(tmp_path.glob("packages/*/src")))
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": copies},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert re.findall(r"^(.+) BROKEN\b", done.stdout, re.MULTILINE) == [contract], done.stdout + done.stderr
