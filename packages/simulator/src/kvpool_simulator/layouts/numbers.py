"""What whole models have a block: bytes and buffers, over all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvpool_simulator.device.models import MODELS, rank_spec
from kvpool_simulator.device.spec import CacheSpec


@dataclass(frozen=True)
class Number:
    """A model as it is deployed."""

    title: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `rank_spec`."""

    def spec(self, *, mtp: bool = False) -> CacheSpec:
        """The caches of its first rank."""
        return rank_spec(self.model, mtp=mtp, **self.options)

    @property
    def has_mtp(self) -> bool:
        """Whether the model has MTP layers."""
        return MODELS[self.model].num_mtp_layers > 0

    @property
    def components(self) -> list[int]:
        """Bytes of a block in each component of one layer."""
        return [
            view.component.kernel_bytes * region.kernel_blocks
            for region, view in self.spec().placed()
            if ".layers.7." in view.layer_name
        ]


C8 = {"c8": True}
NUMBERS = (
    Number("DeepSeek-V3 (61 layers; with MTP 62)", "deepseek-v3"),
    Number("DeepSeek-V3.2", "deepseek-v3.2"),
    Number("DeepSeek-V3.2, C8 indexer", "deepseek-v3.2", C8),
    Number("DeepSeek-V3.2, C8 indexer on A5 (fp8, fp32 scale)", "deepseek-v3.2", {**C8, "a5": True}),
    Number("DeepSeek-V3.2, packed main cache and C8 indexer", "deepseek-v3.2", {**C8, "packed": True}),
    Number("Qwen3-32B (64 layers, 8 KV heads, head size 128), TP 1", "qwen3-32b"),
    Number("Qwen3-32B, TP 4 (2 heads a rank)", "qwen3-32b", {"tp": 4}),
    Number("Qwen3-32B, TP 8 (1 head a rank)", "qwen3-32b", {"tp": 8}),
    Number("Qwen3-32B, TP 16 (each head on 2 ranks)", "qwen3-32b", {"tp": 16}),
    Number("Qwen3-235B (94 layers, 4 KV heads), TP 1", "qwen3-235b"),
    Number("Qwen3-235B, TP 4 (1 head a rank)", "qwen3-235b", {"tp": 4}),
    Number("Qwen3-235B, TP 8 (each head on 2 ranks)", "qwen3-235b", {"tp": 8}),
    Number("Qwen3-235B, TP 16 (each head on 4 ranks)", "qwen3-235b", {"tp": 16}),
)
"""Block size 128, bf16 unless said."""
