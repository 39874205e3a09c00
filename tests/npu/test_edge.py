"""Every line of `ascend.py` on the strict stand-in, and connectors with one mistake each, found by the check named."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvpool_connector.contract.errors import ConfigError, LayoutError
from kvpool_connector.registration import GroupSpec, read_layouts
from kvpool_simulator.npu import BrokenRuleError
from tests.npu.edge import CHECKS, SOURCE, Edge

PLANTED: dict[str, tuple[str, str, str]] = {
    "gather does not wait": (
        "gathers",
        "copy_(pages.index_select(0, ids))\n            self._stream.synchronize()",
        "copy_(pages.index_select(0, ids))",
    ),
    "scatter does not wait": (
        "scatters",
        "view(-1, *pages.shape[1:]))\n            self._stream.synchronize()",
        "view(-1, *pages.shape[1:]))",
    ),
    "checksums are not waited for": (
        "sums",
        "self._sums(address, i).view(torch.uint8))\n            self._stream.synchronize()",
        "self._sums(address, i).view(torch.uint8))",
    ),
    "factors are made on another stream than they are read on": (
        "sums",
        "        with npu.stream(self._stream):\n            self._factors",
        "        if True:\n            self._factors",
    ),
    "gather waits for the wrong stream": (
        "gathers",
        "copy_(pages.index_select(0, ids))\n            self._stream.synchronize()",
        "copy_(pages.index_select(0, ids))\n        npu.current_stream().synchronize()",
    ),
    "a copier's thread has no device": (
        "gathers",
        "        npu.set_device(self._index)\n        with npu.stream(self._stream):\n            ids, objects",
        "        with npu.stream(self._stream):\n            ids, objects",
    ),
    "a thread of checksums has no device": (
        "sums",
        "        npu.set_device(self._index)\n        with npu.stream(self._stream):\n            stored",
        "        with npu.stream(self._stream):\n            stored",
    ),
    "what is written is not waited for": (
        "reads_and_writes",
        "dtype=torch.uint8))\n            self._stream.synchronize()",
        "dtype=torch.uint8))",
    ),
    "reading waits for the engine": (
        "reads_and_writes",
        "        with npu.stream(self._stream):\n            return _bytes_of",
        "        if True:\n            return _bytes_of",
    ),
    "a reading thread has no device": (
        "reads_and_writes",
        "        self.bind_thread()\n        with npu.stream(self._stream):\n            return",
        "        with npu.stream(self._stream):\n            return",
    ),
    "the first device whatever the rank": ("allocates", 'self._name = f"npu:{index}"', 'self._name = "npu:0"'),
    "another device is selected": (
        "gathers",
        "npu.set_device(self._index)\n        with",
        "npu.set_device(0)\n        with",
    ),
    "an event is never recorded": ("waits", "        self._event.record()\n", ""),
    "an event is recorded on a stream of its own": (
        "waits",
        "self._event.record()",
        "self._event.record(npu.Stream())",
    ),
    "a wait without a limit": (
        "waits",
        "        deadline = time.monotonic() + timeout_s\n        while not self._event.query():",
        "        deadline = time.monotonic() + timeout_s\n        self._event.synchronize()\n        while False:",
    ),
    "nobody waits": ("waits", "while not self._event.query():", "while False:"),
    "staging starts anywhere": (
        "allocates",
        "start = -(-tensor.data_ptr() // alignment) * alignment",
        "start = tensor.data_ptr()",
    ),
    "staging ends too early": (
        "allocates",
        "torch.empty(num_bytes + alignment,",
        "torch.empty(num_bytes,",
    ),
    "block ids stay on the host": (
        "gathers",
        "torch.tensor(block_ids, device=self._memory.device)",
        "torch.tensor(block_ids)",
    ),
    "every component from the first one's memory": (
        "gathers",
        "c.base_address - storage.data_ptr())",
        "0)",
    ),
    "a page's words without an end": (
        "sums",
        "torch.nn.functional.pad(page, (0, -page.numel() % CHECKSUM_BYTES))",
        "torch.nn.functional.pad(page, (0, 0))[: page.numel() // 16 * 8]",
    ),
}
"""A mistake: the check that finds it, what it replaces in the source, and by what."""


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "waits"])
def test_the_edge_keeps_the_rules(name: str) -> None:
    CHECKS[name](Edge())


def test_a5_an_event_is_waited_for_within_a_limit() -> None:
    CHECKS["waits"](Edge())


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    check, old, new = PLANTED[mistake]

    def change(source: str) -> str:
        assert old in source, f"what {mistake!r} replaces is not in the source any more"
        return source.replace(old, new)

    with pytest.raises((AssertionError, BrokenRuleError)):
        CHECKS[check](Edge(change))


def test_a_device_that_is_not_there_is_refused_in_words() -> None:
    module = Edge().module
    with pytest.raises(ConfigError, match="local rank 2 has no NPU: this process sees 2; check ASCEND_RT_VISIBLE"):
        module.AscendDevice(2)


def test_memory_of_no_registered_tensor_is_refused_in_words() -> None:
    edge = Edge()
    others = {"model.layers.0.attn": torch.zeros(4, 16, 1, 8)}
    (layout,) = read_layouts(others, [GroupSpec(tuple(others), 16, 4)])
    with pytest.raises(LayoutError, match="is in the memory of no registered tensor"):
        edge.device.copier(layout, edge.caches, edge.staging)


def test_staging_on_the_host_is_refused() -> None:
    edge = Edge()
    host = types.SimpleNamespace(address=0, num_bytes=1 << 16, owner=torch.zeros(1 << 16, dtype=torch.uint8))
    copier = edge.device.copier(edge.layout, edge.caches, host)
    with pytest.raises((BrokenRuleError, RuntimeError), match="npu:1 and on the host"):
        copier.gather([1], 0)


def test_no_line_is_left_out() -> None:
    """The checks above run every line of the file."""
    ran: set[int] = set()
    path = str(SOURCE)

    def trace(frame: types.FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != path:
            return None
        ran.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        for check in CHECKS.values():
            check(Edge())
        Edge().device.bind_thread()
        test_a_device_that_is_not_there_is_refused_in_words()
        test_memory_of_no_registered_tensor_is_refused_in_words()
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
    code = compile(SOURCE.read_text(encoding="utf-8"), path, "exec", dont_inherit=True)
    left_out = sorted(set(lines(code)) - ran)
    assert not left_out, f"lines {left_out} of {SOURCE.name} were not run"


def lines(code: types.CodeType) -> Iterator[int]:
    """Numbers of the lines that hold code."""
    yield from (number for _, _, number in code.co_lines() if number)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from lines(constant)
