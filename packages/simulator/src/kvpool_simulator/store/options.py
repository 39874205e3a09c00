"""What callers and masters can set."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class SoftPinAction(Enum):
    """What a put does to an object's soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicaStatus(Enum):
    """State of one replica."""

    PROCESSING = 0
    COMPLETE = 1


@dataclass
class ReplicateConfig:
    """How an object is placed and pinned; Mooncake's names and defaults."""

    replica_num: int = 1
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False


@dataclass(frozen=True)
class MasterOptions:
    """Flags of `mooncake_master`, in its units and with its defaults (0.3.13.post1)."""

    default_kv_lease_ttl_ms: int = 10_000
    eviction_high_watermark_ratio: float = 0.90
    eviction_ratio: float = 0.05
    put_start_discard_timeout_sec: float = 30.0
    put_start_release_timeout_sec: float = 600.0
    client_ttl_sec: float = 10.0
