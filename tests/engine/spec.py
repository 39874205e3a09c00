"""How an engine is started: arguments, transfer configuration, environment, `mooncake.json`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 4096

BASE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
"""The same for all engines: some of it is read when vLLM is imported, the hash seed when Python starts."""


@dataclass(frozen=True)
class EngineSpec:
    """How an engine is started."""

    model: Path
    block_size: int
    pool: dict[str, Any] | None = None
    """`kv_connector_extra_config`, or None for an engine without a connector."""
    connector: str = "KVPoolConnector"
    module: str | None = "kvpool_connector.vllm"
    """Where the connector is; None for one of vLLM's own."""
    role: str = "kv_both"
    policy: str = "recompute"
    hash_seed: str = "0"
    """`PYTHONHASHSEED`"""
    mooncake_json: Path | None = None
    tensor_parallel_size: int = 1
    processes: bool = False
    """Run the engine's core in a process of its own, as a server does."""
    num_blocks: int | None = None
    patches: tuple[str, ...] = ()
    """`module:function` or `module:function:argument:...`, called in the engine's process before it starts; of effect
    without `processes` only."""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def in_process(self) -> bool:
        """True when core and worker run in the process that serves, so that tests can look inside."""
        return not self.processes and self.tensor_parallel_size == 1

    def environment(self) -> dict[str, str]:
        """Environment variables of the engine's process."""
        variables = {**BASE_ENVIRONMENT, "PYTHONHASHSEED": self.hash_seed}
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.processes else "0"
        if "OMP_NUM_THREADS" in os.environ:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        elif self.tensor_parallel_size > 1:
            cores = sorted(os.sched_getaffinity(0))
            bound = (str(cores[rank % len(cores)]) for rank in range(self.tensor_parallel_size))
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(bound)
        if self.mooncake_json is not None:
            variables["MOONCAKE_CONFIG_PATH"] = str(self.mooncake_json)
        return variables

    def transfer_config(self) -> dict[str, Any] | None:
        """`kv_transfer_config`."""
        if self.pool is None:
            return None
        return {
            "kv_connector": self.connector,
            **({} if self.module is None else {"kv_connector_module_path": self.module}),
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": self.pool,
        }

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "block_size": self.block_size,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "disable_log_stats": False,
            "tensor_parallel_size": self.tensor_parallel_size,
            **self.arguments,
        }
        if self.model.name.startswith("mla"):
            # vLLM's CPU rotary op gives batch-dependent results for this family (0.32.0).
            arguments["compilation_config"] = {"custom_ops": ["none"]}
        if self.model.name.startswith("linear"):
            # The CPU's linear attention takes bf16 alone (0.32.0), and only in this mode are states kept.
            arguments |= {"dtype": "bfloat16", "mamba_cache_mode": "align", "enable_prefix_caching": True}
        if self.num_blocks is not None:
            arguments["num_gpu_blocks_override"] = self.num_blocks
        if (config := self.transfer_config()) is not None:
            arguments["kv_transfer_config"] = config
        return arguments


def write_mooncake_json(path: Path, address: str, **more: Any) -> Path:
    """A `mooncake.json` for an engine that gives no memory."""
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": address,
        "global_segment_size": 0,
        "local_buffer_size": "16MB",
        **more,
    }
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path
