"""What was stored is read back: what a store lost or changed is found, and nothing else is accused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from stores import DictStore

from kvpool_connector.audit import Audit
from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.errors import ConfigError
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Pieces
from kvpool_connector.counters import Counters
from kvpool_connector.host import HostDevice
from kvpool_connector.integrity import Integrity, spacing
from kvpool_connector.registration import GroupSpec, read_layouts
from kvpool_connector.staging import Staging
from kvpool_connector.transfer import PackedTransfer, Unheld

KEYS = [f"k{i}" for i in range(4)]
Fault = Callable[[str, bytes], bytes | None]


class FaultyStore(DictStore):
    """Says that all was stored, and keeps of each value what `fault` makes of it."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def put(self, keys: Sequence[str], addresses: Pieces, sizes: Pieces) -> list[Status]:
        statuses = super().put(keys, addresses, sizes)
        for key in keys:
            kept = self._fault(key, self.objects.pop(key))
            if kept is not None:
                self.objects[key] = kept
        return statuses


def flip(value: bytes, at: int) -> bytes:
    return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]


class Rig:
    """Two components a block, four blocks, one store."""

    def __init__(self, fault: Fault, every: int = 1, *, with_checksums: bool = True) -> None:
        caches = {"model.layers.0.attn": (torch.rand(4, 4, 1, 8), torch.rand(4, 4, 1, 5))}
        (self.layout,) = read_layouts(caches, [GroupSpec(tuple(caches), 4, 4)])
        self.store, device, self.counters = FaultyStore(fault), HostDevice(), Counters()
        self.staging = Staging(self.store, device, 3 * 4 * spacing(self.layout), 1)
        stride = spacing(self.layout) if with_checksums else None
        checksums = device.checksums(self.layout, self.staging.buffer, stride)
        integrity = Integrity(checksums, self.layout, sample_every=1) if with_checksums else None
        trailer = integrity.trailer_bytes if integrity else 0
        audit = Audit(self.store, checksums, self.layout, self.staging, trailer, every, self.counters, stride)
        copier = device.copier(self.layout, caches, self.staging.buffer, stride)
        self.transfer = PackedTransfer(self.store, self.layout, copier, self.staging, 1.0, integrity, audit)

    def save(self) -> list[Status]:
        return self.transfer.save(KEYS, [0, 1, 2, 3], Unheld())


@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_store_that_keeps_its_word_is_not_accused(caplog: pytest.LogCaptureFixture, *, with_checksums: bool) -> None:
    rig = Rig(lambda _, value: value, with_checksums=with_checksums)
    assert rig.save() == [Status.OK] * 4
    assert rig.counters.totals() == {"audit_blocks_ok": 4}
    assert not caplog.records


@pytest.mark.parametrize("with_checksums", [True, False])
def test_a_lost_object_is_not_stored(caplog: pytest.LogCaptureFixture, *, with_checksums: bool) -> None:
    rig = Rig(lambda key, value: None if key == "k2" else value, with_checksums=with_checksums)
    assert rig.save() == [Status.OK, Status.OK, Status.MISS, Status.OK]
    assert rig.counters.totals() == {"audit_blocks_ok": 3, "audit_blocks_lost": 1}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "event=audit_lost key=k2" in line


@pytest.mark.parametrize("with_checksums", [True, False])
@pytest.mark.parametrize(("at", "component"), [(0, 0), (4 * 8 * 4 - 1, 0), (4 * 8 * 4, 1), (4 * 13 * 4 - 1, 1)])
def test_other_bytes_are_removed_and_their_component_named(
    caplog: pytest.LogCaptureFixture, at: int, component: int, *, with_checksums: bool
) -> None:
    rig = Rig(lambda key, value: flip(value, at) if key == "k1" else value, with_checksums=with_checksums)
    assert rig.save() == [Status.OK, Status.CORRUPT, Status.OK, Status.OK]
    assert rig.counters.totals() == {"audit_blocks_ok": 3, "audit_blocks_wrong": 1}
    assert sorted(rig.store.objects) == ["k0", "k2", "k3"]
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    name = f"0.{rig.layout.components[component].name}"
    assert f"event=audit_wrong key=k1 components={name} blocks=1: " in line


def test_another_size_is_removed() -> None:
    rig = Rig(lambda key, value: value[:-1] if key == "k3" else value)
    assert rig.save() == [Status.OK, Status.OK, Status.OK, Status.CORRUPT]
    assert rig.counters.totals()["audit_blocks_wrong"] == 1
    assert "k3" not in rig.store.objects


def test_another_engines_object_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its checksums are its own: the same block, computed elsewhere and stored first."""
    other = Rig(lambda _, value: value)
    other.save()
    rig = Rig(lambda key, value: other.store.objects[key] if key == "k0" else value)
    assert rig.save() == [Status.EXISTS, Status.OK, Status.OK, Status.OK]
    assert rig.counters.totals() == {"audit_blocks_ok": 3, "audit_blocks_others": 1}
    assert len(rig.store.objects) == 4
    assert not caplog.records


def test_one_in_so_many_is_read() -> None:
    rig = Rig(lambda _, __: None, every=3)
    assert [rig.save().count(Status.MISS) for _ in range(3)] == [2, 1, 1]


def test_loads_come_first() -> None:
    rig = Rig(lambda _, __: None)
    with rig.staging.chunk(0), rig.staging.chunk(0):
        assert rig.save() == [Status.OK] * 4
    assert rig.counters.totals() == {"audit_blocks_unread": 4}


def test_an_outage_accuses_nobody() -> None:
    rig = Rig(lambda _, value: value)
    rig.store.answers["get"] = lambda keys: [Status.UNAVAILABLE] * len(keys)
    assert rig.save() == [Status.OK] * 4
    assert rig.counters.totals() == {"audit_blocks_unread": 4}


def test_an_audit_needs_packed_transfer() -> None:
    with pytest.raises(ConfigError, match=r"audit_every = 4 needs .* set transfer .*audit_every to 0"):
        PoolSettings.from_extra_config({"audit_every": 4, "transfer": "direct"})
