"""An Ascend NPU with Mooncake's `ascend` protocol: for a machine that has one (docs/npu.md)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from tests.targets.target import Target


def unreachable() -> str:
    """Why there is no NPU here; empty when there is one."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    return "no device code has run yet: see docs/npu.md"


@contextmanager
def npu() -> Iterator[Target]:
    """Raises `RuntimeError`: the target cannot be reached."""
    raise RuntimeError(f"target npu cannot be reached: {unreachable()}")
    yield
