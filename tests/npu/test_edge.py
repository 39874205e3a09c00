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
    "nobody waits for a copy": ("gathers", "if not event.wait(self._limit_s):", "if False:"),
    "what was scattered is not waited for": ("scatters", "if not event.wait(self._limit_s):", "if False:"),
    "checksums are not waited for": ("sums", "if not event.wait(self._limit_s):", "if False:"),
    "what is written is not waited for": ("reads_and_writes", "if not event.wait(self._limit_s):", "if False:"),
    "factors are made on another stream than they are read on": (
        "sums",
        "        with self._lane.work():\n            self._factors",
        "        if True:\n            self._factors",
    ),
    "another stream is waited for": (
        "gathers",
        "            try:\n                yield\n            finally:\n                event = AscendEvent()",
        "            yield\n        if True:\n            if True:\n                event = AscendEvent()",
    ),
    "a thread has no device": ("gathers", "        npu.set_device(self._index)\n        if", "        if"),
    "reading waits for the engine": (
        "reads_and_writes",
        "        with npu.stream(self._stream):\n            try:",
        "        if True:\n            try:",
    ),
    "a copy waits without a limit": ("gives_up", "event.wait(self._limit_s)", "(self._stream.synchronize() or True)"),
    "block ids are copied by a call that waits": (
        "gives_up",
        "ids.copy_(numbers, non_blocking=True)",
        "ids.copy_(numbers)",
    ),
    "block ids are in memory that the device cannot read by itself": (
        "gives_up",
        "numbers = _pinned(torch.tensor(block_ids))",
        "numbers = torch.tensor(block_ids)",
    ),
    "what is read is copied by a call that waits": (
        "gives_up",
        "found = _to_host(stored != self._sums(address, index))",
        "found = (stored != self._sums(address, index)).cpu()",
    ),
    "more is given to a device that hangs": ("gives_up", "if not self._late.wait(0):", "if False:"),
    "a late device is never used again": ("gives_up", "if not self._late.wait(0):", "if True:"),
    "a late copy is said to be done": (
        "gives_up",
        "                    raise DeviceLateError(self._limit_s, event)\n",
        "",
    ),
    "nobody knows when late work has landed": (
        "gives_up",
        "raise DeviceLateError(self._limit_s, event)",
        "raise DeviceLateError(self._limit_s, None)",
    ),
    "a late copy is not put in order": ("orders", "late_writes.add(event)", "pass"),
    "late copies are put in order on another stream": (
        "orders",
        "                event.order()",
        "                with npu.stream(npu.Stream()):\n                    event.order()",
    ),
    "the first device whatever the rank": ("allocates", 'self._name = f"npu:{index}"', 'self._name = "npu:0"'),
    "another device is selected": (
        "gathers",
        "npu.set_device(self._index)\n        if",
        "npu.set_device(0)\n        if",
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
        "return ids.copy_(numbers, non_blocking=True), objects",
        "return numbers, objects",
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
