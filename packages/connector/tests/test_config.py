"""Settings: bad input is one clear error that says what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvpool_connector.config import PoolSettings, StoreSettings, parse_size
from kvpool_connector.contract.errors import ConfigError

MASTER = {"master_server_address": "127.0.0.1:50051"}
ASCEND_EXTRA = {
    "backend": "mooncake",
    "lookup_rpc_port": "0",
    "load_async": False,
    "use_layerwise": False,
    "consumer_is_to_put": False,
    "consumer_is_to_load": False,
    "save_decode_cache": False,
    "discard_partial_chunks": True,
    "layerwise_prefetch_layers": 1,
}


def test_what_vllm_ascend_users_have_is_accepted() -> None:
    settings = PoolSettings.from_extra_config(ASCEND_EXTRA)
    assert settings.lookup_rpc_port == 0
    assert settings.load_async is False


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("1GB", 1 << 30),
        ("10GiB", 10 << 30),
        ("512MB", 512 << 20),
        ("1.5 gb", 3 << 29),
        ("4k", 4096),
    ],
)
def test_sizes(value: object, expected: int) -> None:
    assert parse_size(value) == expected


@pytest.mark.parametrize("value", ["", "GB", "1 banana", -1, None, True, "1GBB", "1e9"])
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"load_asink": True}, "unknown key 'load_asink'; the nearest known one is 'load_async'"),
        ({"use_layerwise": "sometimes"}, "use_layerwise"),
        *(
            (
                {"kv_head_split": value},
                f'kv_head_split = {value!r}: {value!r} is unknown; expected "rank", "head", or a list of',
            )
            for value in ("heads", [], [0, 4], [True], 8, ["8"], None)
        ),
        ({"discard_partial_chunks": False}, "discard_partial_chunks = False is not supported"),
        ({"backend": "memcache"}, "backend = 'memcache' is not supported"),
        ({"staging_bytes": "1 banana"}, "is not a size"),
        ({"lookup_timeout_s": 0}, "lookup_timeout_s = 0"),
        ({"load_async": "perhaps"}, "load_async = 'perhaps'"),
        ({"prefill_pp_size": 0}, "prefill_pp_size = 0"),
        ({"prefill_pp_layer_partition": "30,x"}, "'30,x' is not a partition; expected the layers of each stage"),
        ({"prefill_pp_layer_partition": "30,0"}, "prefill_pp_layer_partition.1 = 0"),
        ({"prefill_pp_layer_partition": "30,31", "prefill_pp_size": 3}, "has 2 stages, but prefill_pp_size = 3"),
    ],
)
def test_wrong_extra_config(extra: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        PoolSettings.from_extra_config(extra)
    assert words in str(error.value)


def test_all_faults_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as error:
        PoolSettings.from_extra_config({"a": 1, "use_layerwise": "sometimes"})
    assert "unknown key 'a'" in str(error.value)
    assert "use_layerwise" in str(error.value)


@pytest.mark.parametrize(
    ("found", "tenant"), [(None, "default"), ("", "default"), ("  ", "default"), (" team-a ", "team-a")]
)
def test_tenants_are_read_as_vllm_ascend_reads_them(found: str | None, tenant: str) -> None:
    assert StoreSettings(master_server_address="h:1", tenant_id=found).tenant_id == tenant  # type: ignore[arg-type]


def test_the_environment_names_host_and_tenant() -> None:
    environ = {"MOONCAKE_MASTER": "h:1", "MOONCAKE_LOCAL_HOSTNAME": "10.0.0.7", "MOONCAKE_TENANT_ID": "team-a"}
    settings = StoreSettings.from_environment(environ)
    assert (settings.local_hostname, settings.tenant_id) == ("10.0.0.7", "team-a")


def test_file_under_environment(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({**MASTER, "protocol": "tcp", "global_segment_size": "1GB"}))
    settings = StoreSettings.from_environment({"MOONCAKE_CONFIG_PATH": str(path)})
    assert (settings.protocol, settings.global_segment_size) == ("tcp", 1 << 30)
    settings = StoreSettings.from_environment(
        {"MOONCAKE_CONFIG_PATH": str(path), "MOONCAKE_MASTER": "10.0.0.1:1", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64MB"}
    )
    assert (settings.master_server_address, settings.global_segment_size) == ("10.0.0.1:1", 64 << 20)


@pytest.mark.parametrize("size", [1, 1 << 20, (16 << 20) - 1, "15MB"])
def test_a_segment_that_mooncake_would_refuse(size: object) -> None:
    environ = {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(size)}
    with pytest.raises(ConfigError, match=r"at least 16777216 \(16 MiB\)"):
        StoreSettings.from_environment(environ)


def test_no_segment_is_fine() -> None:
    environ = {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0"}
    assert StoreSettings.from_environment(environ).global_segment_size == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not readable as JSON"),
        ("[]", "expected a JSON object"),
        ('{"master_server_adress": "a:1"}', "no master is named"),
        ('{"master_server_address": "a"}', 'expected "host:port"'),
        ('{"master_server_address": "a:99999"}', 'expected "host:port"'),
        ('{"master_server_address": "a:1", "protokol": "tcp"}', "the nearest known one is 'protocol'"),
    ],
)
def test_wrong_files(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        StoreSettings.from_environment({"MOONCAKE_CONFIG_PATH": str(path)})
    assert words in str(error.value)


def test_nothing_configured() -> None:
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH"):
        StoreSettings.from_environment({})
    with pytest.raises(ConfigError, match="not readable"):
        StoreSettings.from_environment({"MOONCAKE_CONFIG_PATH": "/nowhere/mooncake.json"})


@pytest.mark.parametrize(
    ("mode", "preferred", "segment", "expected"),
    [
        ("auto", True, "1GB", False),
        ("auto", True, 0, "auto"),
        ("auto", False, "1GB", "auto"),
        (True, True, "1GB", True),
        (False, True, "1GB", False),
    ],
)
def test_auto_is_off_beside_memory_of_its_own(mode: object, preferred: bool, segment: object, expected: object) -> None:
    store = StoreSettings.model_validate({**MASTER, "preferred_segment": preferred, "global_segment_size": segment})
    assert PoolSettings.from_extra_config({"use_layerwise": mode}).beside(store).use_layerwise == expected


@pytest.mark.parametrize(
    ("extra", "store", "expected"),
    [
        ({}, {"preferred_segment": True, "protocol": "tcp"}, "learnt"),
        ({}, {"preferred_segment": False, "protocol": "tcp"}, "packed"),
        ({}, {"preferred_segment": True, "protocol": "tcp", "global_segment_size": 0}, "packed"),
        ({}, {"preferred_segment": True, "protocol": "ascend"}, "packed"),
        ({"integrity": "sampled"}, {"preferred_segment": True, "protocol": "tcp"}, "packed"),
        ({"audit_every": 7}, {"preferred_segment": True, "protocol": "tcp"}, "packed"),
        ({"transfer": "direct"}, {"preferred_segment": False, "protocol": "tcp"}, "direct"),
        ({"transfer": "packed"}, {"preferred_segment": True, "protocol": "tcp"}, "packed"),
        ({"transfer": "learnt"}, {"preferred_segment": False, "protocol": "ascend"}, "learnt"),
    ],
)
def test_auto_learns_where_the_store_prefers_own_memory(
    extra: dict[str, object], store: dict[str, object], expected: str
) -> None:
    settings = PoolSettings.from_extra_config(extra).beside(StoreSettings.model_validate({**MASTER, **store}))
    assert settings.transfer == expected
    # What was decided is a setting that a user could have given.
    assert PoolSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize("transfer", ["direct", "learnt"])
@pytest.mark.parametrize(("name", "value"), [("integrity", "on"), ("integrity", "sampled"), ("audit_every", 1)])
def test_checksums_need_the_staging_area(transfer: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} = .* needs the staging area"):
        PoolSettings.from_extra_config({"transfer": transfer, name: value})
