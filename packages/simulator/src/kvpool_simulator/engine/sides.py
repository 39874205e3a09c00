"""What the engine calls of a connector, and what it hands over: vLLM's hooks with vLLM's names and shapes.

Checked against vLLM 0.23.0 and 0.32.0 (`distributed/kv_transfer/kv_connector/v1/base.py`, `v1/core/sched/output.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from kvpool_simulator.engine.blocks import Block, BlockPool
from kvpool_simulator.engine.request import Request


class Order(Enum):
    """Whose order of calls."""

    V0_23 = "0.23"
    """Loads start in front of every step; `wait_for_save` is left out where nothing is computed."""
    V0_32 = "0.32"
    """Without a load that the step computes on, loads start behind it; failures may be told by request."""


@dataclass(frozen=True)
class NewRequest:
    """A request's first step (vLLM: `NewRequestData`)."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequests:
    """Requests that workers know (vLLM: `CachedRequestData`)."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """One step as planned."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)
    finished_req_ids: set[str] = field(default_factory=set)
    has_sync_kv_loads: bool = False
    kv_connector_metadata: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True)
class Allocated:
    """A request's blocks by group (vLLM: `KVCacheBlocks`)."""

    blocks: tuple[Sequence[Block], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids by group."""
        return tuple([block.block_id for block in group] for group in self.blocks)


@dataclass
class ConnectorOutput:
    """What the workers say after a step (vLLM: `KVConnectorOutput`)."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_worker_meta: Any = None


class SchedulerSide(Protocol):
    """A connector's scheduler side."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own hit, and whether they load between steps; None to be asked again later."""
        ...

    def update_state_after_alloc(self, request: Request, blocks: Allocated, num_external_tokens: int) -> None:
        """The request has blocks; so many tokens of them are to be loaded."""
        ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        """The step's work for the workers."""
        ...

    def update_connector_output(self, connector_output: ConnectorOutput) -> None:
        """What the workers said, put together."""
        ...

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; True to keep its blocks until the workers say that it is sent."""
        ...

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The engine's block pool, once, before anything else."""
        ...

    def reset_cache(self) -> bool:
        """Forget all that was stored; False when that is not certain."""
        ...

    def num_remembered(self) -> int:
        """Requests of which the connector remembers anything, and anything that waits; 0 when all is done."""
        ...

    def shutdown(self) -> None:
        """Leave."""
        ...


class WorkerSide(Protocol):
    """A connector's worker side: one rank."""

    layerwise: bool
    """Whether the hooks of a layer do anything; where they do not, they are not called."""

    def handle_preemptions(self, kv_connector_metadata: object) -> None:
        """Before the step writes anything."""
        ...

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        """The step's work."""
        ...

    def start_load_kv(self, forward_context: object) -> None:
        """Begin to load."""
        ...

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the layer's KV is there, or known not to come."""
        ...

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object) -> None:
        """The layer's work has been given to the device."""
        ...

    def wait_for_save(self) -> None:
        """The step's work has been given to the device."""
        ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """Requests that are sent, that are loaded, and those of the loaded that failed (told from 0.32 on)."""
        ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not load; each once."""
        ...

    def build_connector_worker_meta(self) -> Any:
        """What this rank tells the scheduler side; it can be merged by `aggregate`."""
        ...

    def clear_connector_metadata(self) -> None:
        """The step has ended."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """True once no save is under way; False when that took longer than `timeout_s` seconds."""
        ...

    def shutdown(self) -> None:
        """Leave."""
        ...
