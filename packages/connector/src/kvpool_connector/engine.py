"""Reads what the connector must know out of vLLM's objects, by attribute: nothing of vLLM is imported here.

The names are checked against vLLM 0.14.1, 0.23.0 and 0.32.0 (`tests/vllm_versions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.errors import ConfigError
from kvpool_connector.contract.keys import tag_of
from kvpool_connector.contract.topology import LayerCuts, Topology, even_sizes
from kvpool_connector.hashing import Hashing
from kvpool_connector.registration import GroupSpec
from kvpool_connector.scheduler import ScheduledRequest
from kvpool_connector.tracker import GroupRule, RequestView

SAMPLE_TOKENS = tuple(range(16))
"""Of the block whose hash is compared between engines; any, but the same for ever."""


def topology_of(config: Any) -> Topology:
    """The engine's parallel shape. A latent cache counts one KV head."""
    parallel, model = config.parallel_config, config.model_config
    return Topology(
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        dcp_size=getattr(parallel, "decode_context_parallel_size", 1),
        cp_interleave=getattr(parallel, "cp_kv_cache_interleave_size", None) or 1,
    )


def cuts_of(config: Any, settings: PoolSettings) -> LayerCuts:
    """Where the pool's objects are cut along the layers. Raises `ConfigError` for a partition of other layers."""
    sizes = settings.prefill_pp_layer_partition
    if not sizes and settings.prefill_pp_size is None:
        return LayerCuts()
    num_layers = config.model_config.get_total_num_hidden_layers()
    sizes = sizes or even_sizes(num_layers, settings.prefill_pp_size or 1)
    if sum(sizes) != num_layers or min(sizes) < 1:
        raise ConfigError(
            f"prefill_pp_layer_partition {','.join(map(str, sizes))!r} is of {sum(sizes)} layers in {len(sizes)} "
            f"stages, but the model has {num_layers}; expected one size of at least 1 a stage, {num_layers} in all"
        )
    return LayerCuts.of(sizes)


def model_of(config: Any, settings: PoolSettings) -> ModelIdentity:
    """Which weights, computed how."""
    model = config.model_config
    return ModelIdentity(
        name=settings.model_id or model.model,
        revision=model.revision or "",
        compute_dtype=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or ""),
        cache_dtype=str(config.cache_config.cache_dtype),
    )


def hashing_of(
    algorithm: str,
    digest: Callable[[Any], bytes],
    hash_block: Callable[..., bytes],
    default_seed: Callable[[Any], str] | None,
    environ: Mapping[str, str],
) -> Hashing:
    """How the engine names blocks: `hash_block` of a hash function, a parent's hash and tokens, from a root on.

    `default_seed`: what the engine makes the root of where `PYTHONHASHSEED` is not set; None for random bytes.
    """
    seed = environ.get("PYTHONHASHSEED")
    root = seed
    if root is None and default_seed is not None:
        # With an algorithm that would give a fixed one away it is drawn anew in every call.
        root, again = default_seed(digest), default_seed(digest)
        root = root if root == again else None
    sample = "" if root is None else hash_block(digest, digest(root), SAMPLE_TOKENS).hex()
    return Hashing(algorithm, seed, sample)


def groups_of(config: Any, cache_config: Any, kv_caches: dict[str, Any], orders: Sequence[str]) -> list[GroupSpec]:
    """The KV cache groups as far as this rank registered them. `orders` as `orders_of` says them."""
    context_size = topology_of(config).cp_size
    return [
        GroupSpec(
            layer_names=tuple(name for name in group.layer_names if name in kv_caches),
            block_size=group.kv_cache_spec.block_size,
            num_blocks=cache_config.num_blocks,
            order=orders[0],
            open_orders=tuple(orders[1:]),
            kind=_kind_of(group.kv_cache_spec, config),
            context_size=context_size,
            num_heads=_num_states(group.kv_cache_spec, config),
        )
        for group in cache_config.kv_cache_groups
    ]


def _kind_of(spec: Any, config: Any) -> str:
    """`state` has no tokens in its pages; the others only name components differently."""
    if "Mamba" in type(spec).__name__:
        return "state"
    return "latent" if config.model_config.use_mla else "attention"


def _num_states(spec: Any, config: Any) -> int | None:
    """A state is split over all tensor-parallel ranks however many KV heads there are, or is the same on all."""
    if _kind_of(spec, config) != "state":
        return None
    return 1 if getattr(spec, "tp_replicated", False) else int(config.parallel_config.tensor_parallel_size)


def orders_of(config: Any, settings: PoolSettings, axes: str) -> tuple[str, ...]:
    """Meaning and byte order of a page's axes; further ones where nobody has ruled them out.

    `axes`: of this platform, empty where they are not known. NZ must be configured: no tensor tells it.
    """
    match settings.cache_order:
        case "ND":
            return (axes or "NHD",)
        case "HND" | "NZ":
            return (settings.cache_order,)
    if (getattr(config, "additional_config", None) or {}).get("enable_kv_nz"):
        return ("NZ",)
    # Tokens come first on an NPU, but for a 310P, whose pages have heads first in NZ order.
    return {"NHD": ("NHD", "NZ"), "HND": ("HND",)}.get(axes, ("NHD", "HND"))


def rule_of(spec: Any, topology: Topology) -> GroupRule:
    """A group's rule of hits. Raises `ConfigError` for a kind of cache that is not supported."""
    name = type(spec).__name__
    if "Mamba" in name:
        return _rule_of_states(spec, topology)
    window = None
    if "SlidingWindow" in name:
        window = spec.sliding_window - 1
    elif "ChunkedLocal" in name:
        window = spec.attention_chunk_size
    return GroupRule(spec.block_size * topology.cp_size, window)


def _rule_of_states(spec: Any, topology: Topology) -> GroupRule:
    mode = getattr(spec, "mamba_cache_mode", None)
    if mode != "align":
        raise ConfigError(
            f"a KV cache group of {type(spec).__name__} with mamba_cache_mode {mode!r} keeps no state at the end of a "
            "block; start the engine with --mamba-cache-mode align and prefix caching on, or serve without the pool"
        )
    if topology.cp_size > 1:
        raise ConfigError(
            f"a KV cache group of {type(spec).__name__} with context parallelism (prefill {topology.pcp_size}, decode "
            f"{topology.dcp_size}): how a rank's states cover its tokens is not known; set both sizes to 1"
        )
    return GroupRule(spec.block_size, 1, state=True, prompts_only=spec.num_speculative_blocks > 0)


def hash_block_size_of(config: Any, cache_config: Any, topology: Topology) -> int:
    """Tokens that one of the engine's block hashes covers."""
    resolved = getattr(cache_config, "hash_block_size", None)
    return int(resolved or config.cache_config.block_size * topology.cp_size)


def view_of(request: Any) -> RequestView:
    """A request as the scheduler side sees it."""
    lora = request.lora_request
    return RequestView(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        block_hashes=request.block_hashes,
        tag=tag_of(lora.lora_name if lora else None, request.cache_salt),
        poolable=request.prompt_embeds is None and request.pooling_params is None,
        trace_headers=tuple((request.trace_headers or {}).items()),
        token_ids=request.all_token_ids,
        lora_name=lora.lora_name if lora else None,
    )


def scheduled_of(output: Any) -> Iterator[ScheduledRequest]:
    """The step's requests."""
    for new in output.scheduled_new_reqs:
        num_scheduled = output.num_scheduled_tokens[new.req_id]
        yield ScheduledRequest(new.req_id, _held(new.block_ids), True, new.num_computed_tokens, num_scheduled)
    cached = output.scheduled_cached_reqs
    for i, request_id in enumerate(cached.req_ids):
        yield ScheduledRequest(
            request_id,
            _held(cached.new_block_ids[i]),
            request_id in cached.resumed_req_ids,
            cached.num_computed_tokens[i],
            output.num_scheduled_tokens[request_id],
        )


def _held(tables: Sequence[Sequence[int]] | None) -> list[list[int | None]] | None:
    """Block 0 is vLLM's null block: no block is held there."""
    return None if tables is None else [[block_id or None for block_id in table] for table in tables]


def tables_of(blocks: Any) -> list[list[int | None]]:
    """A request's block ids by group, as the engine's manager hands them to connectors."""
    return [[None if block.is_null else block.block_id for block in group] for group in blocks.blocks]
