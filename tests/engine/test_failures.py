"""What cannot work is one clear error at start."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.engine import EngineError, engine
from tests.engine.models import BLOCK_SIZE
from tests.engine.spec import EngineSpec, write_mooncake_json


def test_an_unreachable_master(models: Callable[[str], Path], tmp_path: Path) -> None:
    config = write_mooncake_json(tmp_path / "mooncake.json", "127.0.0.1:1")
    made = EngineSpec(models("gqa"), BLOCK_SIZE["gqa"], pool={}, mooncake_json=config)
    with pytest.raises(EngineError, match=r"no Mooncake master answers at 127\.0\.0\.1:1"), engine(made):
        pass


def test_a_master_that_says_nothing_is_an_error_in_time(models: Callable[[str], Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = write_mooncake_json(tmp_path / "mooncake.json", f"127.0.0.1:{silent.getsockname()[1]}")
        made = EngineSpec(models("gqa"), BLOCK_SIZE["gqa"], pool={"setup_timeout_s": 15}, mooncake_json=config)
        started = time.monotonic()
        told = r"Mooncake's setup (returned -1|did not return within 15 s)"
        with pytest.raises(EngineError, match=told), engine(made):
            pass
        # Mooncake by itself would try for 90 s; an engine takes a while to come to it.
        assert time.monotonic() - started < 15 + 30


def test_a_wrong_key(spec: Callable[..., EngineSpec]) -> None:
    with (
        pytest.raises(EngineError, match="unknown key 'load_asink'; the nearest known one is 'load_async'"),
        engine(spec("gqa", "wrong-key", {"load_asink": True})),
    ):
        pass
