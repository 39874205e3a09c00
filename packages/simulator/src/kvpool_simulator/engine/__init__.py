"""A small engine that drives a connector's two sides in vLLM's order of calls, and checks every byte it computes on.

Public names, one module a noun:

- `engine`: `Engine`, its `Rank`s and `Timing` (virtual seconds a layer, so that what a connector hides behind computing
  can be measured); hooks a layer are called where a side says `layerwise`.
- `sides`: the protocols `SchedulerSide` and `WorkerSide` for connectors, and what is handed over; `Order`.
- `scheduler`: `Scheduler`, `Limits`; `groups`: `Group`; `blocks`: `BlockPool`; `request`: `Wish`, `Request`.
- `oracle`: `RankMemory`, what the KV of every token must be; `forward`: a step's work on the devices.
- `workload`: `Users`, `Mix`. `faults`: `Faults`, `faulty_store`.
- `tasks`: `Tasks`, threads one at a time in virtual time; `threads`: `controlled`, which puts a module under them.
"""

from kvpool_simulator.engine.engine import Engine, Rank, Timing
from kvpool_simulator.engine.faults import Faults, faulty_store
from kvpool_simulator.engine.groups import Group
from kvpool_simulator.engine.oracle import RankMemory
from kvpool_simulator.engine.request import Request, RequestStatus, Wish
from kvpool_simulator.engine.scheduler import Limits, Scheduler
from kvpool_simulator.engine.sides import ConnectorOutput, Order, SchedulerOutput, SchedulerSide, WorkerSide
from kvpool_simulator.engine.tasks import StuckError, Tasks
from kvpool_simulator.engine.threads import controlled
from kvpool_simulator.engine.workload import Mix, Users

__all__ = [
    "ConnectorOutput",
    "Engine",
    "Faults",
    "Group",
    "Limits",
    "Mix",
    "Order",
    "Rank",
    "RankMemory",
    "Request",
    "RequestStatus",
    "Scheduler",
    "SchedulerOutput",
    "SchedulerSide",
    "StuckError",
    "Tasks",
    "Timing",
    "Users",
    "Wish",
    "WorkerSide",
    "controlled",
    "faulty_store",
]
