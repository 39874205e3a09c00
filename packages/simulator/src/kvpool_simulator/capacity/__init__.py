"""How large must a pool be? A trace of requests replayed against pools of several sizes.

`python -m kvpool_simulator.capacity TRACE --pool-size 256GB --pool-size 1TB --instances 4`
"""

from kvpool_simulator.capacity.pool import SizedPool
from kvpool_simulator.capacity.replay import Fleet, Outcome, replay
from kvpool_simulator.capacity.trace import Request, TraceError, read_trace, sample_trace

__all__ = ["Fleet", "Outcome", "Request", "SizedPool", "TraceError", "read_trace", "replay", "sample_trace"]
