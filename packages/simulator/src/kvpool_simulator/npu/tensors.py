"""Tensors of a simulated NPU: host memory that looks like a device's and is computed by streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from kvpool_simulator.npu.streams import BrokenRuleError

if TYPE_CHECKING:
    from kvpool_simulator.npu.machine import Machine

UNWRITTEN = 0xA5
"""Fills memory that no work has written yet."""
READS = ("aten::nonzero", "aten::_local_scalar_dense")
"""Operators whose result the host needs: they wait for the current stream."""


class NpuTensor(torch.Tensor):
    """A tensor on a simulated NPU. `memory` is the same bytes on the host, for whoever plays the device."""

    memory: torch.Tensor
    machine: Machine
    device_index: int

    @staticmethod
    def of(memory: torch.Tensor, machine: Machine, index: int) -> NpuTensor:
        """The tensor `memory`, on device `index`."""
        tensor: NpuTensor = torch.Tensor._make_subclass(NpuTensor, memory)
        tensor.memory, tensor.machine, tensor.device_index = memory, machine, index
        return tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """`npu:N`."""
        return torch.device("npu", self.device_index)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """A copy on the host; waits for the current stream."""
        stream = self.machine.stream_for([self])
        copied: list[torch.Tensor] = []
        stream.append(lambda: copied.append(self.memory.clone()))
        stream.synchronize()
        return copied[0]

    def tolist(self) -> Any:
        """The values; waits for the current stream."""
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """Raises: no array can lie in a device's memory."""
        raise BrokenRuleError("numpy() of a tensor on an NPU; copy it to the host first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Check the rules, and queue the work."""
        kwargs = kwargs or {}
        flat = tree_flatten((args, kwargs))[0]
        tensors = [value for value in flat if isinstance(value, NpuTensor)]
        first = tensors[0]
        machine, index = first.machine, first.device_index
        hosts = [value for value in flat if isinstance(value, torch.Tensor) and not isinstance(value, NpuTensor)]
        schema, name = func._schema, func._schema.name
        copies = name == "aten::copy_" and isinstance(args[0], NpuTensor)
        if any(value.dim() for value in hosts) and name != "aten::copy_":
            raise BrokenRuleError(f"{name} of tensors on npu:{index} and on the host; expected all on one device")
        if name == "aten::copy_" and hosts and not (_non_blocking(args, kwargs) and machine.is_pinned(hosts[0])):
            # Memory that the device cannot read and write by itself is copied by a call that waits.
            stream = machine.stream_for(tensors)
            stream.append(lambda: func(*_memory(args), **_memory(kwargs)))
            stream.synchronize()
            return args[0]
        if name == "aten::copy_" and not copies:
            machine.stream_for(tensors).append(lambda: func(*_memory(args), **_memory(kwargs)))
            return args[0]

        def wrapped(value: Any) -> Any:
            return NpuTensor.of(value, machine, index) if isinstance(value, torch.Tensor) else value

        machine.operators.add(f"{name}.{schema.overload_name}" if schema.overload_name else name)
        if name == "aten::set_":
            # Which memory a tensor is of is known at once; the work is in what is read and written.
            first.memory.set_(*args[1:])
            return first
        if _is_view(schema):
            return tree_map(wrapped, func(*_memory(args), **_memory(kwargs)))
        stream = machine.stream_for(tensors)
        if name in READS:
            stream.synchronize()
            return tree_map(wrapped, func(*_memory(args), **_memory(kwargs)))
        if schema.is_mutable:
            written = [v for v, argument in zip(args, schema.arguments, strict=False) if _is_written(argument)]
            written += [kwargs[a.name] for a in schema.arguments if _is_written(a) and a.name in kwargs]
            stream.append(lambda: func(*_memory(args), **_memory(kwargs)))
            return written[0]
        shape = func(*_meta(args), **_meta(kwargs))
        found = unwritten(shape.shape, shape.stride(), shape.dtype)
        stream.append(lambda: found.copy_(func(*_memory(args), **_memory(kwargs))))
        return wrapped(found)


def unwritten(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Host memory that holds nothing yet."""
    found = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
    torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage()).fill_(UNWRITTEN)
    return found


def npu_tensors(values: Any) -> Iterator[NpuTensor]:
    """The simulated tensors among values, however nested."""
    for value in tree_flatten(values)[0]:
        if isinstance(value, NpuTensor):
            yield value


def _non_blocking(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _is_view(schema: Any) -> bool:
    return any(found.alias_info is not None and not found.alias_info.is_write for found in schema.returns)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _memory(values: Any) -> Any:
    return tree_map(lambda value: value.memory if isinstance(value, NpuTensor) else value, values)


def _meta(values: Any) -> Any:
    def meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return tree_map(meta, values)
