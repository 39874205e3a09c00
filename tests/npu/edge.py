"""`ascend.py` on a strict stand-in of an NPU: what its tests, and the connectors with a mistake, are run through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvpool_connector.registration import GroupSpec, read_layouts
from kvpool_simulator.npu import Machine

SOURCE = Path(__file__).parents[2] / "packages/connector/src/kvpool_connector/ascend.py"
ALIGNMENT = 2 << 20


class Edge:
    """One device of `ascend.py`, caches on it, and staging memory.

    Two layers: `(k, v)` in one storage, whose `v` ends within a word, and one in kernel blocks with holes between them.
    """

    def __init__(self, change: Callable[[str], str] = lambda source: source, index: int = 1) -> None:
        """`change`: of the source of `ascend.py`. The device is not the first, which anything would fall back to."""
        self.machine = Machine(num_devices=2)
        self.module = self.machine.load(SOURCE, change)
        self.device = self.module.AscendDevice(index)
        generator = torch.Generator().manual_seed(5)
        both, holed = (
            torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
            for num_bytes in (4 * (128 + 12), 8 * 100)
        )
        self.host = [both[:512], both[512:], holed]
        """What the caches hold, on the host. Only what has landed on the device."""
        kv, raw = (self.machine.place(memory, index) for memory in (both, holed))
        k, v = kv[:512].view(torch.float32).view(4, 4, 1, 8), kv[512:].view(torch.int8).view(4, 4, 1, 3)
        self.caches: dict[str, Any] = {
            "model.layers.0.attn": (k, v),
            "model.layers.1.attn": raw.as_strided((8, 2, 1, 8), (100, 8, 8, 1)),
        }
        (self.layout,) = read_layouts(self.caches, [GroupSpec(tuple(self.caches), 4, 4)])
        self.staging = self.device.allocate(1 << 16, ALIGNMENT)
        self.staged: torch.Tensor = self.staging.owner.memory
        """The staging memory, on the host."""

    def pages(self, block_id: int) -> bytes:
        """What an object of the block holds, by plain loops."""
        k, v, raw = (memory.numpy().tobytes() for memory in self.host)
        found = k[block_id * 128 : (block_id + 1) * 128] + v[block_id * 12 : (block_id + 1) * 12]
        for kernel_block in (2 * block_id, 2 * block_id + 1):
            found += raw[kernel_block * 100 : kernel_block * 100 + 16]
        return found

    def object(self, index: int, address: int = 0) -> bytes:
        """What lies in staging, `address` bytes behind its start."""
        start = address + index * self.layout.object_bytes
        return self.staged[start : start + self.layout.object_bytes].numpy().tobytes()

    def elsewhere(self, call: Callable[[], Any]) -> Any:
        """What a call gives in a thread that has set no device, as the connector's threads are."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(call())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]


def gathers(edge: Edge) -> None:
    """Blocks are in staging when `gather` returns, whatever order they come in, in any thread."""
    copier = edge.device.copier(edge.layout, edge.caches, edge.staging)
    at = edge.layout.object_bytes
    edge.elsewhere(lambda: copier.gather([3, 1], edge.staging.address + at))
    assert [edge.object(0, at), edge.object(1, at)] == [edge.pages(3), edge.pages(1)]


def scatters(edge: Edge) -> None:
    """Blocks are in the cache when `scatter` returns; other blocks and the holes stay as they were."""
    copier = edge.device.copier(edge.layout, edge.caches, edge.staging)
    expected = [edge.pages(block_id) for block_id in range(4)]
    holes = [edge.host[2][kernel_block * 100 + 16 : (kernel_block + 1) * 100].tolist() for kernel_block in range(8)]
    size = edge.layout.object_bytes
    for i, value in enumerate((expected[3], expected[1])):
        edge.staged[i * size : (i + 1) * size] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    edge.elsewhere(lambda: copier.scatter([0, 2], edge.staging.address))
    assert [edge.pages(block_id) for block_id in range(4)] == [expected[3], expected[1], expected[1], expected[3]]
    assert holes == [
        edge.host[2][kernel_block * 100 + 16 : (kernel_block + 1) * 100].tolist() for kernel_block in range(8)
    ]


def sums(edge: Edge) -> None:
    """Checksums are in staging when `write` returns; any flipped bit is found, in its component and no other."""
    copier = edge.device.copier(edge.layout, edge.caches, edge.staging)
    checksums = edge.device.checksums(edge.layout, edge.staging)
    sizes = [component.page_bytes for component in edge.layout.components]
    trailers = edge.staging.address + (1 << 15)
    assert any(size % 8 for size in sizes), "a page that ends within a word"
    edge.elsewhere(lambda: copier.gather([3, 1, 0, 2], edge.staging.address))
    edge.elsewhere(lambda: checksums.write(edge.staging.address, 4, trailers))
    words = edge.staged[1 << 15 :][: 4 * 8 * len(sizes)].view(torch.int64).tolist()
    assert words == [total for i in range(4) for total in expected_sums(edge.object(i), sizes)]

    def differing() -> list[list[int]]:
        return [
            edge.elsewhere(lambda i=i: checksums.differing(edge.staging.address, i, trailers))  # type: ignore[misc]
            for i in range(4)
        ]

    assert differing() == [[]] * 4
    for k, start in enumerate(sum(sizes[:k]) for k in range(len(sizes))):
        for byte in (0, sizes[k] - 1):
            at = 2 * edge.layout.object_bytes + start + byte
            edge.staged[at] ^= 128
            assert differing() == [[], [], [k], []]
            edge.staged[at] ^= 128


def expected_sums(value: bytes, sizes: list[int]) -> list[int]:
    """The checksums of an object, by plain loops: signed 64-bit sums."""
    found, start = [], 0
    for size in sizes:
        page = value[start : start + size] + bytes(-size % 8)
        start += size
        total = sum(int.from_bytes(page[at : at + 8], "little") * (at // 4 + 1) for at in range(0, len(page), 8))
        total %= 1 << 64
        found.append(total - (1 << 64) if total >> 63 else total)
    return found


def apart(edge: Edge) -> None:
    """Objects that lie apart, each with its checksums right behind it: nothing between them is touched."""
    size, num_sums = edge.layout.object_bytes, len(edge.layout.components)
    stride = size + 8 * num_sums + 5
    copier = edge.device.copier(edge.layout, edge.caches, edge.staging, stride)
    checksums = edge.device.checksums(edge.layout, edge.staging, stride)
    start, trailers = edge.staging.address, edge.staging.address + size
    edge.staged[: 3 * stride] = 0xA5
    edge.elsewhere(lambda: copier.gather([3, 1], start))
    edge.elsewhere(lambda: checksums.write(start, 2, trailers))
    for i, block_id in enumerate((3, 1)):
        whole = edge.staged[i * stride :][:stride].numpy().tobytes()
        assert whole[:size] == edge.pages(block_id)
        words = torch.frombuffer(bytearray(whole[size:-5]), dtype=torch.int64).tolist()
        assert words == expected_sums(whole[:size], [component.page_bytes for component in edge.layout.components])
        assert whole[-5:] == b"\xa5" * 5
    assert edge.staged[2 * stride :][:stride].eq(0xA5).all()
    edge.staged[stride] ^= 1
    assert [edge.elsewhere(lambda i=i: checksums.differing(start, i, trailers)) for i in range(2)] == [[], [0]]  # type: ignore[misc]
    edge.staged[stride] ^= 1
    expected = [edge.pages(3), edge.pages(1)]
    edge.elsewhere(lambda: copier.scatter([0, 2], start))
    assert [edge.pages(0), edge.pages(2)] == expected


def waits(edge: Edge) -> None:
    """An event has happened when the engine's work before it has landed, and its wait has a limit."""
    k = edge.caches["model.layers.0.attn"][0]
    k.fill_(7.0)
    event = edge.device.record_event()
    assert not torch.equal(edge.host[0].view(torch.float32), torch.full((128,), 7.0))
    edge.machine.clock.hangs = True
    assert edge.elsewhere(lambda: event.wait(0.01)) is False
    edge.machine.clock.hangs = False
    assert edge.elsewhere(lambda: event.wait(30)) is True
    assert torch.equal(edge.host[0].view(torch.float32), torch.full((128,), 7.0))


def allocates(edge: Edge) -> None:
    """Staging starts on 2 MiB, on the device of the local rank, and holds all its bytes."""
    for num_bytes in (1, 4097, 3 << 20):
        buffer = edge.device.allocate(num_bytes, ALIGNMENT)
        assert buffer.address % ALIGNMENT == 0
        assert buffer.num_bytes == buffer.owner.numel() == num_bytes
        assert buffer.owner.data_ptr() == buffer.address
        assert edge.machine.device_of(buffer.address, num_bytes) == 1


def reads_and_writes(edge: Edge) -> None:
    """A few bytes of staging go to and come from the host, whatever the engine has queued."""
    edge.caches["model.layers.0.attn"][0].fill_(7.0)
    at = edge.staging.address + 12345
    edge.elsewhere(lambda: edge.device.write(edge.staging, at, b"nineteen bytes here"))
    assert edge.staged[12345:][:19].numpy().tobytes() == b"nineteen bytes here"
    assert edge.elsewhere(lambda: edge.device.read(edge.staging, at + 3, 5)) == b"eteen"
    assert not edge.machine.default_stream(1).query(), "the engine's work was waited for"


def gives_up(edge: Edge) -> None:
    """Nothing waits without a limit for a device that hangs, and what is late is told with an event after it."""
    copier = edge.device.copier(edge.layout, edge.caches, edge.staging)
    checksums = edge.device.checksums(edge.layout, edge.staging)
    device = edge.module.AscendDevice(1, limit_s=0)
    late, at = edge.module.DeviceLateError, edge.staging.address
    calls = {
        "gather": lambda: copier.gather([3, 1], at),
        "scatter": lambda: copier.scatter([0], at),
        "checksums": lambda: checksums.write(at, 1, at + (1 << 15)),
        "comparing": lambda: checksums.differing(at, 0, at + (1 << 15)),
        "read": lambda: device.read(edge.staging, at, 8),
        "write": lambda: device.write(edge.staging, at, b"eight by"),
    }
    # Work lands when it is first asked for, so that only what hangs is late.
    edge.machine.clock.queries_until_landed = 0
    copier._lane._limit_s = checksums._lane._limit_s = 0
    for name, call in calls.items():
        edge.machine.clock.hangs = True
        events = []
        for _ in range(2):
            try:
                edge.elsewhere(call)
            except late as error:
                if error.__context__ is not None:
                    raise error.__context__ from None
                events.append(error.event)
        assert len(events) == 2, f"{name} was said to be done"
        first, second = events
        assert first is not None and second is None, f"{name}: more work was given to a device that hangs"
        assert not first.wait(0)
        edge.machine.clock.hangs = False
        assert first.wait(0)
        try:
            edge.elsewhere(call)
        except late:
            raise AssertionError(f"{name} is given up for ever, though the late work has landed") from None


def orders(edge: Edge) -> None:
    """What the engine writes after a copy that was given up stays, though the copy lands later than it would have."""
    copier = edge.device.copier(edge.layout, edge.caches, edge.staging)
    edge.machine.clock.queries_until_landed = 0
    copier._lane._limit_s = 0
    kept = edge.pages(1)
    copier._lane._stream.hangs = True
    try:
        edge.elsewhere(lambda: copier.scatter([0], edge.staging.address))
        raise AssertionError("a copy that has not landed was said to be done")
    except edge.module.DeviceLateError:
        pass
    edge.device.order_late_copies()
    k = edge.caches["model.layers.0.attn"][0]
    k[:1].fill_(7.0)
    event = edge.device.record_event()
    assert not event.wait(0), "the engine's work did not wait for the late copy"
    copier._lane._stream.hangs = False
    assert event.wait(0)
    copier._lane._stream.synchronize()
    assert edge.host[0].view(torch.float32)[:32].eq(7.0).all(), "the late copy came over what the engine has written"
    assert edge.pages(1) == kept
    edge.device.order_late_copies()
    k[:1].fill_(8.0)
    copier._lane._stream.hangs = True
    assert edge.device.record_event().wait(0), "the engine waits for a copy that has landed"


CHECKS = {
    check.__name__: check
    for check in (gathers, scatters, sums, apart, waits, allocates, reads_and_writes, gives_up, orders)
}
