"""What the adapter does on a machine with an NPU, with stand-ins for torch_npu and vLLM-Ascend; no engine runs."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator

import pytest
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from kvpool_connector import vllm as adapter
from kvpool_connector.config import StoreSettings
from kvpool_connector.contract.errors import ConfigError
from kvpool_simulator.npu import Machine

SHARED = "vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine"
ASCEND = StoreSettings(master_server_address="127.0.0.1:1", protocol="ascend")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(current_platform, "device_type", "npu", raising=False)
    machine = Machine(num_devices=4)
    with machine.host():
        yield machine
    sys.modules.pop("kvpool_connector.ascend", None)


def test_a_worker_takes_the_npu_of_its_local_rank(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    group = types.SimpleNamespace(local_rank=2, rank=10)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: group)
    device = adapter.this_device()
    assert machine.clock.device == 2
    machine.set_device(0)
    device.bind_thread()
    assert machine.clock.device == 2
    assert machine.device_of(device.allocate(4096, 2 << 20).address, 4096) == 2
    group.local_rank = 4
    with pytest.raises(ConfigError, match="local rank 4 has no NPU: this process sees 4"):
        adapter.this_device()


def test_the_engine_of_vllm_ascend_is_shared(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    parts = SHARED.split(".")
    for i in range(len(parts)):
        module = types.ModuleType(".".join(parts[: i + 1]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    engine = object()
    module.global_te = engine  # type: ignore[attr-defined]
    assert adapter.shared_engine(ASCEND) is engine
    for other in ({"protocol": "tcp"}, {"protocol": "rdma"}, {"fabric_memory": True}):
        assert adapter.shared_engine(ASCEND.model_copy(update=other)) is None
    del module.global_te  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, logger="vllm.kvpool"):
        adapter.logger.addHandler(caplog.handler)
        try:
            assert adapter.shared_engine(ASCEND) is None
        finally:
            adapter.logger.removeHandler(caplog.handler)
    assert "event=own_transfer_engine" in caplog.text
