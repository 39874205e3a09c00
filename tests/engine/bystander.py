"""A connector that has nothing and takes part in everything: the other child of a `MultiConnector`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

SHORT_TOKENS = 8
_held: set[str] = set()
"""Requests whose blocks the scheduler side keeps. Both sides are in one process in these tests."""


@dataclass
class BystanderHandshake(KVConnectorHandshakeMetadata):
    """Says something that only it understands."""

    port: int = 7


@dataclass
class BystanderReport(KVConnectorWorkerMetadata):
    """A report of its own each step."""

    steps: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> BystanderReport:
        """Their sum."""
        assert isinstance(other, BystanderReport)
        return BystanderReport(self.steps + other.steps)


class Bystander(KVConnectorBase_V1, SupportsHMA):
    """Keeps every ended request's blocks until the next step, as one that sends them would; not those of short ones.

    So an engine that nobody asks anything keeps some.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._ended: set[str] = set()

    def get_handshake_metadata(self) -> BystanderHandshake:
        """Before or after the other child's."""
        return BystanderHandshake()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Whatever it is."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What ended in the step before has been sent."""
        sent, self._ended = self._ended, finished_req_ids & _held
        _held.difference_update(sent)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=set(), failed_recving=set())

    def build_connector_worker_meta(self) -> BystanderReport:
        """Every step."""
        return BystanderReport()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """None."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to tell."""
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """The blocks are still being sent."""
        keep = request.num_prompt_tokens > SHORT_TOKENS
        if keep:
            _held.add(request.request_id)
        return keep, None

    request_finished_all_groups = request_finished
