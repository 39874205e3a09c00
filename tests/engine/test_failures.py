"""The pool breaks; requests do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import PROMPTS, tokens
from tests.engine.engine import Answer, EngineError, EngineSpec, engine, write_mooncake_json
from tests.engine.models import BLOCK_SIZE
from tests.targets.real_mooncake import RealMaster, real_master

Spec = Callable[..., EngineSpec]
Baseline = Callable[[str], list[Answer]]
FAULTS = ("fail_first", "fail_middle", "fail_last")


@pytest.mark.parametrize("kind", ["gqa", "two-groups"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a9_lost_blocks_are_computed_instead(spec: Spec, baseline: Baseline, kind: str, fault: str) -> None:
    namespace = f"faults-{kind}"
    if fault == FAULTS[0]:
        with engine(spec(kind, namespace)) as saving:
            saving.generate(PROMPTS)
    for load_async in (False, True) if kind == "gqa" and fault == FAULTS[1] else (False,):
        patched = spec(kind, namespace, {"load_async": load_async}, patches=(f"tests.engine.faults:{fault}",))
        with engine(patched) as loading:
            assert tokens(loading.generate(PROMPTS)) == tokens(baseline(kind))
            # What was computed on the way is right too: it now comes from the local cache.
            assert tokens(loading.generate(PROMPTS)) == tokens(baseline(kind))


def test_a6_recycled_blocks_under_load(spec: Spec, models: Callable[[str], Path]) -> None:
    prompts = [[(i * 11 + j * (i + 3)) % 250 for j in range(100 + 13 * (i % 7))] for i in range(48)]
    short = {"max_model_len": 512}
    with engine(EngineSpec(models("gqa"), BLOCK_SIZE["gqa"], arguments=short)) as plain:
        expected = tokens(plain.generate(prompts, max_tokens=40))
    made = spec("gqa", "recycled", {"save_decode_cache": True}, num_blocks=64, arguments=short)
    for _ in range(2):
        with engine(made) as running:
            assert tokens(running.generate(prompts, max_tokens=40)) == expected


@pytest.fixture
def own_master() -> Iterator[RealMaster]:
    with real_master(256 << 20, lease_s=5) as made:
        yield made


@pytest.mark.parametrize("failure", ["killed", "hung"])
def test_a_master_that_fails_in_the_middle_of_serving(
    own_master: RealMaster, models: Callable[[str], Path], baseline: Baseline, tmp_path: Path, failure: str
) -> None:
    config = write_mooncake_json(tmp_path / "mooncake.json", own_master.address)
    limits = {"lookup_timeout_s": 1.0, "outage_pause_s": 5.0, "drain_timeout_s": 5.0}
    made = EngineSpec(models("gqa"), BLOCK_SIZE["gqa"], pool=limits, mooncake_json=config)
    expected = tokens(baseline("gqa"))
    with engine(made) as running:
        assert tokens(running.generate(PROMPTS[:1])) == expected[:1]
        if failure == "killed":
            own_master.kill()
        else:
            own_master.stop()
        started = time.monotonic()
        for i in range(1, len(PROMPTS)):
            assert tokens(running.generate(PROMPTS[i : i + 1])) == expected[i : i + 1]
        # One lookup may run into its limit every five seconds; nothing else may wait.
        assert time.monotonic() - started < 10
        if failure == "hung":
            own_master.go_on()


def test_an_unreachable_master_is_one_clear_error_at_start(models: Callable[[str], Path], tmp_path: Path) -> None:
    config = write_mooncake_json(tmp_path / "mooncake.json", "127.0.0.1:1")
    made = EngineSpec(models("gqa"), BLOCK_SIZE["gqa"], pool={}, mooncake_json=config)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"no Mooncake master answers at 127\.0\.0\.1:1"), engine(made):
        pass
    assert time.monotonic() - started < 60


def test_a_wrong_key_is_one_clear_error_at_start(spec: Spec) -> None:
    with (
        pytest.raises(EngineError, match="unknown key 'load_asink'; the nearest known one is 'load_async'"),
        engine(spec("gqa", "wrong-key", {"load_asink": True})),
    ):
        pass


def test_two_namespaces_do_not_share(spec: Spec, baseline: Baseline) -> None:
    made = spec("gqa", "other-namespace")
    with engine(made) as running:
        running.generate(PROMPTS)
    with engine(spec("gqa", "yet-another-namespace")) as running:
        answers = running.generate(PROMPTS)
        assert tokens(answers) == tokens(baseline("gqa"))
        assert sum(answer.num_cached_tokens for answer in answers) == 0
