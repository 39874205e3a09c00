"""An Ascend node's KV caches and a Mooncake store, simulated on a CPU.

Two simulators that meet only at lists of addresses and sizes, where production meets too: `device` knows bytes and
layers and no keys, `store` knows keys and leases and no layers.
"""

__version__ = "0.1.0"
