"""What callers and masters can set."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvpool_simulator.store import codes
from kvpool_simulator.store.arguments import boolean, integer, text, texts


class Numbered(Enum):
    """An enumeration whose members turn into integers but do not equal them."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


class SoftPinAction(Numbered):
    """What a put does to an object's soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(Numbered):
    """What an object is; the store only keeps it."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


def _member(kind: type[Enum]) -> Callable[[Any], Enum]:
    def check(value: Any) -> Enum:
        if not isinstance(value, kind):
            raise TypeError(f"{value!r} is no {kind.__name__}")
        return value

    return check


def _or_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


SETTINGS: dict[str, tuple[object, Callable[[Any], object]]] = {
    "replica_num": (1, integer),
    "nof_replica_num": (0, integer),
    "dfs_replica_num": (0, integer),
    "soft_pin_action": (SoftPinAction.PRESERVE, _member(SoftPinAction)),
    "soft_pin_ttl_ms": (None, _or_none(integer)),
    "with_hard_pin": (False, boolean),
    "preferred_segment": ("", text),
    "preferred_segments": ([], texts),
    "preferred_nof_segments": ([], texts),
    "prefer_alloc_in_same_node": (False, boolean),
    "data_type": (ObjectDataType.UNKNOWN, _member(ObjectDataType)),
    "group_ids": (None, _or_none(texts)),
}
"""Default and accepted values of each setting of a put."""


class ReplicateConfig:
    """How an object is placed and pinned: Mooncake's names and defaults.

    As with Mooncake's, a wrong type raises `TypeError` and an unknown name (`with_soft_pin`, of old) `AttributeError`.
    """

    __slots__ = tuple(SETTINGS)

    replica_num: int
    nof_replica_num: int
    dfs_replica_num: int
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: int | None
    with_hard_pin: bool
    preferred_segment: str
    preferred_segments: list[str]
    preferred_nof_segments: list[str]
    prefer_alloc_in_same_node: bool
    data_type: ObjectDataType
    group_ids: list[str] | None

    def __init__(self) -> None:
        for name, (default, _) in SETTINGS.items():
            object.__setattr__(self, name, copy(default))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in SETTINGS:
            raise AttributeError(f"'ReplicateConfig' object has no attribute {name!r}; it has {', '.join(SETTINGS)}")
        object.__setattr__(self, name, SETTINGS[name][1](value))

    def refusal(self, num_keys: int, max_soft_pin_ttl_ms: int) -> int:
        """The code of a put of `num_keys` objects with these settings: `OK` unless they are impossible."""
        if self.replica_num < 1 or self.nof_replica_num:
            return codes.INVALID_PARAMS
        if self.group_ids is not None and len(self.group_ids) != num_keys:
            return codes.INVALID_PARAMS
        if self.soft_pin_ttl_ms is not None and (
            self.soft_pin_action is not SoftPinAction.ENABLE or self.soft_pin_ttl_ms > max_soft_pin_ttl_ms
        ):
            return codes.INVALID_PARAMS
        return codes.DFS_NOT_ENABLED if self.dfs_replica_num else codes.OK


@dataclass(frozen=True)
class MasterOptions:
    """Flags of `mooncake_master`, in its units and with its defaults (0.3.13.post1)."""

    default_kv_lease_ttl_ms: int = 10_000
    default_kv_soft_pin_ttl_ms: int = 1_800_000
    max_kv_soft_pin_ttl_ms: int = 86_400_000
    allow_evict_soft_pinned_objects: bool = True
    eviction_high_watermark_ratio: float = 0.90
    eviction_ratio: float = 0.05
    put_start_discard_timeout_sec: float = 30.0
    put_start_release_timeout_sec: float = 600.0
    client_ttl_sec: float = 10.0
