"""A drop-in for `mooncake.store` (0.3.13.post1): same names, arguments and return codes, over simulated memory.

`SimulatedMaster` stands for `mooncake_master`; time is virtual unless told otherwise.
"""

from kvpool_simulator.store.client import MooncakeDistributedStore
from kvpool_simulator.store.codes import WouldCrashError
from kvpool_simulator.store.descriptors import BufferHandle, ReplicaDescriptor, ReplicaStatus
from kvpool_simulator.store.fault import Fault
from kvpool_simulator.store.options import MasterOptions, ObjectDataType, ReplicateConfig, SoftPinAction
from kvpool_simulator.store.simulated_master import SimulatedMaster

__all__ = [
    "BufferHandle",
    "Fault",
    "MasterOptions",
    "MooncakeDistributedStore",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SimulatedMaster",
    "SoftPinAction",
    "WouldCrashError",
]
