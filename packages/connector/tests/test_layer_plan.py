"""Ranges cover objects without holes, and hang on the hooks that speak for their layers."""

from __future__ import annotations

import pytest

from kvpool_connector.contract.errors import LayoutError
from kvpool_connector.contract.layout import Component, Layer, ShardLayout
from kvpool_connector.layer_plan import LayerPlan


def component(name: str, num_bytes: int) -> Component:
    return Component(name, "int8", (num_bytes,), "NHD", 1 << 20, num_bytes, num_bytes)


def layer(label: str, *names: str, num_bytes: int = 1000) -> Layer:
    return Layer(label, names, (component("kv", num_bytes),))


def attention(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def indexer(index: int) -> str:
    return f"model.layers.{index}.self_attn.indexer.k_cache"


def plan_of(*groups: list[Layer], per_transfer: int | None = 1) -> LayerPlan:
    return LayerPlan([ShardLayout(g, 16, 4, tuple(layers)) for g, layers in enumerate(groups)], per_transfer)


def test_a_layer_with_hooks_in_several_groups_is_refused_in_words() -> None:
    with pytest.raises(
        LayoutError, match=r"layer 0: its cache entries .*window.*self_attn.attn.*use_layerwise to false"
    ):
        plan_of([layer("0", "model.layers.0.window")], [layer("0", attention(0))])


@pytest.mark.parametrize("per_transfer", [1, 2, 3, 5, 7, None])
def test_ranges_cover_the_object(per_transfer: int | None) -> None:
    layers = [layer(str(i), attention(i), num_bytes=1000 + i) for i in range(5)]
    plan = plan_of(layers, per_transfer=per_transfer)
    at = 0
    for index, piece in enumerate(plan.ranges[0]):
        assert (piece.index, piece.offset) == (index, at)
        at += piece.layout.object_bytes
    assert at == ShardLayout(0, 16, 4, tuple(layers)).object_bytes
    assert [one for piece in plan.ranges[0] for one in piece.layout.layers] == layers
    assert plan.hooks(0) == {attention(i) for i in range(5)}


@pytest.mark.parametrize(("num_bytes", "count"), [(1000, 1), (20_000, 1), (50_000, 2), (2_000_000, 5)])
def test_small_layers_are_moved_together(num_bytes: int, count: int) -> None:
    plan = plan_of([layer(str(i), attention(i), num_bytes=num_bytes) for i in range(5)], per_transfer=None)
    assert len(plan.ranges[0]) == count


def test_a_layer_waits_for_itself_and_is_saved_by_itself() -> None:
    plan = plan_of([layer(str(i), attention(i)) for i in range(3)])
    assert plan.needed == {attention(i): {(0, i)} for i in range(3)}
    assert {hook: [p.index for p in due] for hook, due in plan.due.items()} == {attention(i): [i] for i in range(3)}
    assert not any(piece.after_step for piece in plan.ranges[0])


def test_an_indexer_of_its_own_is_waited_for_one_layer_earlier() -> None:
    plan = plan_of([layer(str(i), attention(i), indexer(i)) for i in range(3)])
    assert plan.needed[""] == {(0, 0)}
    assert plan.needed[attention(0)] == {(0, 0), (0, 1)}
    assert plan.needed[attention(1)] == {(0, 1), (0, 2)}
    assert plan.needed[attention(2)] == {(0, 2)}
    assert plan.hooks(0) == {attention(i) for i in range(3)}


def test_an_indexer_of_its_own_is_saved_one_layer_later() -> None:
    plan = plan_of([layer(str(i), attention(i), indexer(i)) for i in range(3)])
    assert [piece.ready for piece in plan.ranges[0]] == [
        {attention(0), attention(1)},
        {attention(1), attention(2)},
        {attention(2)},
    ]
    assert [piece.after_step for piece in plan.ranges[0]] == [False, False, True]
    assert not plan.repeating


def test_an_indexer_in_a_group_of_its_own_hangs_on_its_layers_attention() -> None:
    plan = plan_of([layer(str(i), attention(i)) for i in range(2)], [layer(str(i), indexer(i)) for i in range(2)])
    assert plan.needed[""] == {(1, 0)}
    assert plan.needed[attention(0)] == {(0, 0), (1, 0), (1, 1)}
    assert [(p.shard, p.index) for p in plan.due[attention(1)]] == [(0, 1), (1, 0), (1, 1)]


def test_groups_whose_layers_alternate_wait_for_their_own() -> None:
    plan = plan_of([layer("0", attention(0)), layer("2", attention(2))], [layer("1", attention(1))])
    assert plan.needed == {attention(0): {(0, 0)}, attention(1): {(1, 0)}, attention(2): {(0, 1)}}
    assert plan.hooks(1) == {attention(1)}


def test_a_layer_that_shares_anothers_tensors_hangs_on_the_other() -> None:
    plan = plan_of([layer("0", attention(0), attention(2)), layer("1", attention(1))])
    assert plan.hooks(0) == {attention(0), attention(1)}
    assert [p.index for p in plan.due[attention(0)]] == [0]


def test_layers_of_multi_token_prediction_are_saved_after_the_step() -> None:
    plan = plan_of([layer("10", attention(10)), layer("mtp.0", "mtp.layers.0.self_attn.attn")])
    assert [piece.after_step for piece in plan.ranges[0]] == [False, True]
    assert plan.repeating == {"mtp.layers.0.self_attn.attn"}
    assert plan.needed["mtp.layers.0.self_attn.attn"] == {(0, 1)}


def test_a_layer_without_any_hook_is_there_before_the_step_and_saved_after_it() -> None:
    plan = plan_of([layer("0", indexer(0)), layer("1", attention(1))])
    assert plan.needed[""] == {(0, 0)}
    assert [piece.after_step for piece in plan.ranges[0]] == [True, False]


def test_several_shards_of_a_group_have_ranges_of_their_own_on_the_same_hooks() -> None:
    layout = ShardLayout(1, 16, 4, (layer("0", attention(0)), layer("1", attention(1))))
    plan = LayerPlan([layout, layout], 1)
    assert [[(piece.shard, piece.index) for piece in pieces] for pieces in plan.ranges] == [
        [(0, 0), (0, 1)],
        [(1, 0), (1, 1)],
    ]
    assert plan.needed[attention(1)] == {(0, 1), (1, 1)}
