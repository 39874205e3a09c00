"""Connectors of which one worker describes its cache, or is configured, otherwise than the others."""

from __future__ import annotations

from typing import Any

import torch

from kvpool_connector.vllm import KVPoolConnector, this_rank


class OtherDtype(KVPoolConnector):
    """The second rank of tensor parallelism takes its last layer's pages for whole numbers."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As the first rank does, or with one layer changed."""
        if this_rank().tp == 1:
            last = list(kv_caches)[-1]
            kv_caches = {**kv_caches, last: self.changed(kv_caches[last])}
        super().register_kv_caches(kv_caches)

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes with another meaning."""
        return tensor.view(torch.int32)


class OtherShape(OtherDtype):
    """The second rank has only half of each head in its last layer."""

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Half of the last axis, without holes: of a tensor of its own."""
        return tensor[..., : tensor.shape[-1] // 2].contiguous()


class OtherSettings(KVPoolConnector):
    """The second rank stores no checksums."""

    def _make_worker(self, store_settings: Any) -> Any:
        if this_rank().tp == 1:
            self._settings = self._settings.model_copy(update={"integrity": "off"})
        return super()._make_worker(store_settings)


class OtherNamespace(KVPoolConnector):
    """The second rank uses another namespace."""

    def _make_worker(self, store_settings: Any) -> Any:
        if this_rank().tp == 1:
            self._settings = self._settings.model_copy(update={"namespace": "elsewhere"})
        return super()._make_worker(store_settings)
