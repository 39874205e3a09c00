"""What is read out of vLLM's objects, with stand-ins that have only the attributes that are read."""

from __future__ import annotations

import hashlib
import os
from types import SimpleNamespace as Thing
from typing import Any

import pytest

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.errors import ConfigError, TopologyError
from kvpool_connector.contract.keys import tag_of
from kvpool_connector.contract.topology import LayerCuts, Topology
from kvpool_connector.engine import (
    cuts_of,
    groups_of,
    hash_block_size_of,
    hashing_of,
    model_of,
    orders_of,
    rule_of,
    scheduled_of,
    tables_of,
    topology_of,
    view_of,
)
from kvpool_connector.hashing import Hashing
from kvpool_connector.tracker import GroupRule


def config(**parallel: int) -> Any:
    """A vLLM configuration: eight KV heads, not latent."""
    return Thing(
        parallel_config=Thing(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **parallel}),
        model_config=Thing(
            use_mla=False,
            get_total_num_kv_heads=lambda: 8,
            model="org/model",
            revision=None,
            dtype="torch.bfloat16",
            quantization="ascend",
        ),
        cache_config=Thing(cache_dtype="auto", block_size=128),
    )


def test_topology() -> None:
    found = topology_of(
        config(tensor_parallel_size=16, decode_context_parallel_size=2, cp_kv_cache_interleave_size=128)
    )
    assert found == Topology(8, 16, dcp_size=2, cp_interleave=128)
    latent = config(tensor_parallel_size=16, prefill_context_parallel_size=2)
    latent.model_config.use_mla = True
    assert topology_of(latent) == Topology(1, 16, pcp_size=2)
    with pytest.raises(TopologyError, match="do not divide one another"):
        topology_of(config(tensor_parallel_size=3))


@pytest.mark.parametrize(
    ("extra", "starts"),
    [
        ({}, ()),
        ({"prefill_pp_size": 2}, (0, 3)),
        ({"prefill_pp_layer_partition": "1,2,2"}, (0, 1, 3)),
        ({"prefill_pp_layer_partition": "1,4", "prefill_pp_size": 2}, (0, 1)),
        ({"prefill_pp_layer_partition": ""}, ()),
    ],
)
def test_c3_where_objects_are_cut(extra: dict[str, Any], starts: tuple[int, ...]) -> None:
    engine = config()
    engine.model_config.get_total_num_hidden_layers = lambda: 5
    assert cuts_of(engine, PoolSettings.from_extra_config(extra)) == LayerCuts(starts)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"prefill_pp_layer_partition": "2,2"}, "'2,2' is of 4 layers in 2 stages, but the model has 5; expected one"),
        ({"prefill_pp_size": 6}, "'1,1,1,1,1,0' is of 5 layers in 6 stages"),
    ],
)
def test_c3_a_partition_of_other_layers_is_refused(extra: dict[str, Any], words: str) -> None:
    engine = config()
    engine.model_config.get_total_num_hidden_layers = lambda: 5
    with pytest.raises(ConfigError, match=words):
        cuts_of(engine, PoolSettings.from_extra_config(extra))


def test_the_model_is_its_path_unless_it_has_a_name() -> None:
    found = model_of(config(), PoolSettings())
    assert (found.name, found.compute_dtype, found.quantization) == ("org/model", "bfloat16", "ascend")
    assert model_of(config(), PoolSettings(model_id="m")).name == "m"


def test_the_byte_order_comes_from_the_configuration() -> None:
    plain, fractal = config(), config()
    fractal.additional_config = {"enable_kv_nz": True}
    assert [orders_of(plain, PoolSettings(), axes) for axes in ("NHD", "HND")] == [("NHD", "NZ"), ("HND",)]
    assert orders_of(plain, PoolSettings(), "") == ("NHD", "HND")
    assert orders_of(fractal, PoolSettings(), "NHD") == ("NZ",)
    for axes in ("NHD", ""):
        assert orders_of(fractal, PoolSettings(cache_order="ND"), axes) == ("NHD",)
    assert orders_of(plain, PoolSettings(cache_order="ND"), "HND") == ("HND",)
    for order in ("NZ", "HND"):
        assert orders_of(plain, PoolSettings(cache_order=order), "NHD") == (order,)


class SlidingWindowSpec(Thing):
    """Told by its name, as vLLM's is."""


class MambaSpec(Thing):
    """States."""


class FullAttentionSpec(Thing):
    """The common one."""


def test_rules() -> None:
    topology = Topology(1, 4, pcp_size=2, dcp_size=2)
    assert rule_of(FullAttentionSpec(block_size=128, sliding_window=None), topology).block_size == 512
    assert rule_of(SlidingWindowSpec(block_size=16, sliding_window=64), Topology(1)).window == 63
    spec = MambaSpec(block_size=96, mamba_cache_mode="align", num_speculative_blocks=0)
    assert rule_of(spec, Topology(2, 4)) == GroupRule(96, 1, state=True)
    spec.num_speculative_blocks = 1
    assert rule_of(spec, Topology(2, 4)) == GroupRule(96, 1, state=True, prompts_only=True)


@pytest.mark.parametrize(
    ("mode", "topology", "words"),
    [
        ("all", Topology(1), "MambaSpec with mamba_cache_mode 'all' keeps no state .* --mamba-cache-mode align and"),
        (None, Topology(1), "mamba_cache_mode None keeps no state at the end of a block; start the engine with"),
        ("align", Topology(1, 2, pcp_size=2), r"context parallelism \(prefill 2, decode 1\).* set both sizes to 1"),
        ("align", Topology(1, 2, dcp_size=2), r"context parallelism \(prefill 1, decode 2\).* set both sizes to 1"),
    ],
)
def test_states_that_cannot_be_pooled_are_refused_in_words(mode: str | None, topology: Topology, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rule_of(MambaSpec(block_size=96, mamba_cache_mode=mode, num_speculative_blocks=0), topology)


@pytest.mark.parametrize(("replicated", "expected"), [(False, 4), (True, 1)])
def test_b1_states_are_split_over_all_ranks_however_many_heads_there_are(replicated: bool, expected: int) -> None:
    made = config()
    made.parallel_config.tensor_parallel_size = 4
    groups = [
        Thing(layer_names=["a"], kv_cache_spec=FullAttentionSpec(block_size=16)),
        Thing(layer_names=["s"], kv_cache_spec=MambaSpec(block_size=16, tp_replicated=replicated)),
    ]
    specs = groups_of(made, Thing(kv_cache_groups=groups, num_blocks=9), {"a": None, "s": None}, ("NHD",))
    assert [(spec.kind, spec.num_heads) for spec in specs] == [("attention", None), ("state", expected)]


def test_hash_block_size() -> None:
    assert hash_block_size_of(config(), Thing(hash_block_size=16), Topology(1)) == 16
    assert hash_block_size_of(config(), Thing(), Topology(1, 2, dcp_size=2)) == 256


def test_b5_adapters_and_salts_become_typed_tags() -> None:
    request = Thing(
        request_id="r",
        num_tokens=10,
        num_prompt_tokens=9,
        block_hashes=[],
        lora_request=Thing(lora_name="X"),
        cache_salt=None,
        prompt_embeds=None,
        pooling_params=None,
        trace_headers={"traceparent": "00-1-2-01"},
        all_token_ids=[7],
    )
    assert view_of(request).tag == tag_of(lora="X")
    assert view_of(request).trace_headers == (("traceparent", "00-1-2-01"),)
    request.trace_headers = None
    assert view_of(request).trace_headers == ()
    request.lora_request, request.cache_salt = None, "X"
    assert view_of(request).tag == tag_of(salt="X") != tag_of(lora="X")
    assert view_of(request).poolable
    assert view_of(request).token_ids == [7]
    for field in ("prompt_embeds", "pooling_params"):
        assert not view_of(Thing(**{**vars(request), field: object()})).poolable


def test_a_steps_requests() -> None:
    output = Thing(
        scheduled_new_reqs=[Thing(req_id="new", block_ids=([1, 2], [0, 3]), num_computed_tokens=16)],
        scheduled_cached_reqs=Thing(
            req_ids=["old", "resumed"],
            resumed_req_ids={"resumed"},
            new_block_ids=[None, ([4],)],
            num_computed_tokens=[20, 0],
        ),
        num_scheduled_tokens={"new": 5, "old": 1, "resumed": 7},
    )
    new, old, resumed = scheduled_of(output)
    assert (new.block_ids, new.replaces, new.num_scheduled_tokens) == ([[1, 2], [None, 3]], True, 5)
    assert (old.block_ids, old.replaces, old.num_computed_tokens) == (None, False, 20)
    assert (resumed.block_ids, resumed.replaces) == ([[4]], True)


def test_null_blocks_are_no_blocks() -> None:
    blocks = Thing(blocks=([Thing(is_null=True, block_id=0), Thing(is_null=False, block_id=5)],))
    assert tables_of(blocks) == [[None, 5]]


def test_layers_of_other_stages_are_left_out() -> None:
    spec = FullAttentionSpec(block_size=16)
    cache = Thing(num_blocks=4, kv_cache_groups=[Thing(layer_names=["a", "b"], kv_cache_spec=spec)])
    (group,) = groups_of(config(), cache, {"b": object()}, ("NHD", "HND"))
    assert (group.layer_names, group.num_blocks, group.kind) == (("b",), 4, "attention")
    assert (group.order, group.open_orders) == ("NHD", ("HND",))


def test_b11_how_the_engine_names_blocks() -> None:
    def digest(value: Any) -> bytes:
        return hashlib.sha256(repr(value).encode()).digest()

    def hash_block(digest: Any, parent: bytes, tokens: Any) -> bytes:
        return bytes(digest((parent, tokens)))

    def found(default_seed: Any, environ: dict[str, str]) -> Hashing:
        return hashing_of("sha256", digest, hash_block, default_seed, environ)

    def fixed(digest: Any) -> str:
        return "fixed"

    # vLLM up to 0.23 without a seed, and a newer one with an algorithm for which it has no fixed one.
    assert found(None, {}) == Hashing("sha256", None, "")
    assert found(lambda digest: os.urandom(8).hex(), {}) == Hashing("sha256", None, "")
    samples = {found(seed, environ).sample for seed in (fixed, None) for environ in ({}, {"PYTHONHASHSEED": "1"})}
    assert len(samples - {""}) == 2
    assert found(None, {"PYTHONHASHSEED": "1"}) == found(fixed, {"PYTHONHASHSEED": "1"})
    assert found(fixed, {}).seed is None
    assert found(fixed, {"PYTHONHASHSEED": "fixed"}).sample == found(fixed, {}).sample
