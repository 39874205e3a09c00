"""A host with NPUs as `torch_npu` shows them, strict about its rules. None of it has been compared with a real one."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions
from torch.utils.backend_registration import rename_privateuse1_backend

from kvpool_simulator.npu.streams import BrokenRuleError, Clock, Event, Stream, switched
from kvpool_simulator.npu.tensors import NpuTensor, unwritten

weak_reference: Any = reductions.StorageWeakRef


class Machine:
    """NPUs of one process. `npu` stands for `torch.npu`, `torch` for torch with that in it."""

    def __init__(self, num_devices: int = 2) -> None:
        _name_the_device()
        self.num_devices = num_devices
        self.clock = Clock()
        self.operators: set[str] = set()
        """Names of the operators that ran, with their overloads, as `aten::index_select`."""
        self._defaults = [Stream(self.clock, index, default=True) for index in range(num_devices)]
        self._allocations: dict[int, tuple[int, int, Any]] = {}
        """By address: bytes, the device, and whether they are still held."""
        self._pinned: dict[int, Any] = {}
        """Host memory that the device reads and writes by itself: by address whether it is still held."""
        self.streams: list[Stream] = []
        """All that were made, the defaults apart."""
        self.npu = types.SimpleNamespace(
            Event=lambda: Event(self.clock, self.current_stream),
            Stream=self.new_stream,
            current_device=lambda: self.clock.device,
            current_stream=self.current_stream,
            device_count=lambda: num_devices,
            is_available=lambda: num_devices > 0,
            set_device=self.set_device,
            stream=self.on_stream,
        )
        self.torch: Any = _Torch(self)

    def set_device(self, device: int | str | torch.device) -> None:
        """The calling thread's device from now on."""
        index = device if isinstance(device, int) else torch.device(device).index
        if not 0 <= index < self.num_devices:
            raise BrokenRuleError(f"device {index} does not exist; this host has {self.num_devices}")
        self.clock.local.device = index
        self.clock.local.stream = None

    def new_stream(self, device: int | None = None, priority: int = 0) -> Stream:
        """A stream of the calling thread's device."""
        stream = Stream(self.clock, self.clock.device if device is None else device)
        self.streams.append(stream)
        return stream

    def default_stream(self, index: int) -> Stream:
        """Where the engine's work goes."""
        return self._defaults[index]

    def current_stream(self) -> Stream:
        """Where the calling thread's work goes."""
        stream: Stream | None = getattr(self.clock.local, "stream", None)
        return stream or self._defaults[self.clock.device]

    def on_stream(self, stream: Stream | None) -> AbstractContextManager[None]:
        """See `torch.npu.stream`."""
        if stream is not None and stream.index != self.clock.device:
            raise BrokenRuleError(f"a stream of device {stream.index} in a thread of device {self.clock.device}")
        return switched(self.clock.local, stream)

    def stream_for(self, tensors: Sequence[NpuTensor]) -> Stream:
        """Where work on these tensors goes. Raises `BrokenRuleError` unless all are on the thread's device."""
        indices = {tensor.device_index for tensor in tensors}
        if indices != {self.clock.device}:
            raise BrokenRuleError(
                f"work on tensors of devices {sorted(indices)} in a thread of device {self.clock.device}; "
                "expected one device, the thread's"
            )
        return self.current_stream()

    def place(self, memory: torch.Tensor, index: int) -> NpuTensor:
        """Take a host tensor's memory for that of a device."""
        storage = memory.untyped_storage()
        self._allocations = {at: found for at, found in self._allocations.items() if not found[2].expired()}
        self._allocations[storage.data_ptr()] = storage.nbytes(), index, weak_reference(storage)
        return NpuTensor.of(memory, self, index)

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        """Take a host tensor's memory for pinned."""
        storage = memory.untyped_storage()
        self._pinned = {at: held for at, held in self._pinned.items() if not held.expired()}
        self._pinned[storage.data_ptr()] = weak_reference(storage)
        return memory

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Whether the device reads and writes a host tensor's memory by itself."""
        held = self._pinned.get(memory.untyped_storage().data_ptr())
        return held is not None and not held.expired()

    def device_of(self, address: int, num_bytes: int) -> int | None:
        """The device in whose memory a range begins; None for host memory. Raises where it ends outside."""
        for start, (size, index, held) in self._allocations.items():
            if start <= address < start + size and not held.expired():
                if address + num_bytes > start + size:
                    raise BrokenRuleError(
                        f"[{address:#x}, {address + num_bytes:#x}) ends outside its allocation on npu:{index}, "
                        f"[{start:#x}, {start + size:#x})"
                    )
                return index
        return None

    @contextmanager
    def host(self) -> Iterator[None]:
        """In the block, `import torch` and `import torch_npu` find this machine."""
        stand_ins: dict[str, Any] = {"torch": self.torch, "torch_npu": types.ModuleType("torch_npu")}
        before = {name: sys.modules.get(name) for name in stand_ins}
        sys.modules.update(stand_ins)
        try:
            yield
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    def load(self, path: Path, change: Callable[[str], str] = lambda source: source) -> Any:
        """The module at `path`, changed, as it runs on this machine."""
        spec = importlib.util.spec_from_loader(f"on_npu_{path.stem}", loader=None, origin=str(path))
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        module.__file__ = str(path)
        code = compile(change(path.read_text(encoding="utf-8")), str(path), "exec", dont_inherit=True)
        with self.host():
            exec(code, module.__dict__)
        return module


class _Torch:
    """torch, whose factories know the simulated device."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.npu = machine.npu

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(
        self, *shape: Any, device: Any = None, dtype: torch.dtype | None = None, pin_memory: bool = False, **more: Any
    ) -> torch.Tensor:
        made = torch.empty(*shape, dtype=dtype, **more)
        if (index := _npu_index(device)) is None:
            return self._machine.pin(made) if pin_memory else made
        if index != self._machine.clock.device:
            raise BrokenRuleError(
                f"an allocation on npu:{index} in a thread of device {self._machine.clock.device}; set the device first"
            )
        return self._machine.place(unwritten(made.shape, made.stride(), made.dtype), index)

    def tensor(self, data: Any, *, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._moved(torch.tensor(data, dtype=dtype), device)

    def arange(self, *bounds: Any, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._moved(torch.arange(*bounds, dtype=dtype), device)

    def _moved(self, values: torch.Tensor, device: Any) -> torch.Tensor:
        target = self.empty(values.shape, device=device, dtype=values.dtype)
        return target.copy_(values)


def _npu_index(device: Any) -> int | None:
    found = torch.device(device) if device is not None else None
    return (found.index or 0) if found is not None and found.type == "npu" else None


def _name_the_device() -> None:
    """`npu` becomes the name of torch's device type for others, as importing torch_npu does."""
    if torch._C._get_privateuse1_backend_name() != "npu":
        rename_privateuse1_backend("npu")
