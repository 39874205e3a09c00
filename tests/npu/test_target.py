"""The target for a machine with an NPU, on the stand-in: worker, `ascend.py`, `mooncake.py` and protocol together."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Iterator

import pytest

from kvpool_conformance.cases import NAMED_CASES, Deployment
from kvpool_conformance.suites.round_trip import fresh, load_all, moved, save_all
from kvpool_connector.contract.errors import StoreSetupError
from tests.targets import npu as targets
from tests.targets.npu import StandInTarget, npu, npu_stand_in, unreachable

LAYOUTS = ("gqa", "mla", "sparse-bundled", "sparse-split-c8", "padded-kernel-blocks", "attention-and-mamba")


@pytest.fixture(scope="module")
def target() -> Iterator[StandInTarget]:
    with npu_stand_in() as found:
        yield found


@pytest.mark.parametrize("way", ["packed", "direct", "layerwise"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_saved_is_loaded_byte_for_byte(target: StandInTarget, layout: str, way: str) -> None:
    deployment = Deployment(NAMED_CASES[layout], transfer=way)
    contents = {block_id: fresh() for block_id in (1, 7, 2)}
    with target.node(deployment) as source:
        save_all(source, contents)
    with target.node(deployment) as loaded:
        load_all(loaded, moved(contents, (3, 0, 5)))


@pytest.mark.parametrize("way", ["packed", "layerwise"])
def test_checksums_are_made_and_compared_on_the_device(target: StandInTarget, way: str) -> None:
    deployment = Deployment(NAMED_CASES["sparse-split-c8"], transfer=way, integrity="on")
    contents = {block_id: fresh() for block_id in (1, 7, 2)}
    with target.node(deployment) as source, target.node(deployment) as loaded:
        save_all(source, contents)
        value = target.peek(target.key(deployment, 0, contents[7]))
        assert value is not None
        target.poke(target.key(deployment, 0, contents[7]), 100, bytes([value[100] ^ 1]))
        loaded.poison()
        assert loaded.load(contents) == {7}
        assert not loaded.mismatches({1: contents[1], 2: contents[2]})


def test_another_process_has_another_device(target: StandInTarget) -> None:
    deployment = Deployment(NAMED_CASES["mla"])
    contents = {block_id: fresh() for block_id in (1, 7, 2)}
    with target.node(deployment, elsewhere=True) as source:
        save_all(source, contents)
    with target.node(deployment) as loaded:
        load_all(loaded, moved(contents, (3, 0, 5)))


def test_caches_off_the_grid_are_refused_piece_by_piece(target: StandInTarget) -> None:
    deployment = Deployment(NAMED_CASES["gqa-310p-nz"], transfer="direct")
    assert "on no multiple of 2 MiB" in target.offers(deployment)
    with pytest.raises(StoreSetupError, match=r'2 MiB\. Set transfer to "packed"'), target.node(deployment):
        pass


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="there may be an NPU here")
def test_a_machine_without_an_npu_is_told_what_it_lacks() -> None:
    assert unreachable().startswith("torch_npu is not installed")
    with pytest.raises(RuntimeError, match="target npu cannot be reached: torch_npu is not installed"), npu():
        pass


def test_torch_npu_without_cann_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, and not importable: as on a machine where the wheel is and CANN is not."""
    there = types.SimpleNamespace(find_spec=lambda name: object())
    monkeypatch.setattr(targets, "importlib", types.SimpleNamespace(util=there))
    assert "source CANN's set_env.sh first" in unreachable()
