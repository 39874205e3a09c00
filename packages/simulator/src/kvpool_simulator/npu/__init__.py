"""An Ascend NPU as `torch_npu` and Mooncake's protocol `ascend` show it, strict about their rules.

`Machine` runs code that imports `torch_npu`: `Machine().load(path)`. Work is queued and runs when it is waited for;
what a real one would refuse or do wrong raises `BrokenRuleError`, or shows as wrong bytes. `Transport` stands for the
module `mooncake.store` there.
"""

from kvpool_simulator.npu.machine import Machine
from kvpool_simulator.npu.streams import BrokenRuleError
from kvpool_simulator.npu.tensors import NpuTensor
from kvpool_simulator.npu.transport import Transport

__all__ = ["BrokenRuleError", "Machine", "NpuTensor", "Transport"]
