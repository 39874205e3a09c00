"""A drop-in for `mooncake.store` (0.3.13.post1): same names, arguments and return codes, over simulated memory.

`SimulatedMaster` stands for `mooncake_master`; time is virtual unless told otherwise.
"""

from kvpool_simulator.store.client import MooncakeDistributedStore
from kvpool_simulator.store.codes import WouldCrashError
from kvpool_simulator.store.options import MasterOptions, ReplicaStatus, ReplicateConfig, SoftPinAction
from kvpool_simulator.store.service import SimulatedMaster

__all__ = [
    "MasterOptions",
    "MooncakeDistributedStore",
    "ReplicaStatus",
    "ReplicateConfig",
    "SimulatedMaster",
    "SoftPinAction",
    "WouldCrashError",
]
