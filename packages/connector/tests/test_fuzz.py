"""Whatever comes from outside: no crash, no hang, no memory beyond a bound; what is wrong is named as such."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clocks import ManualClock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import DictStore

from kvpool_connector.config import MIB, PoolSettings, StoreSettings, parse, parse_size
from kvpool_connector.contract.descriptor import Descriptor
from kvpool_connector.contract.errors import ConfigError, DescriptorError, KeyFormatError
from kvpool_connector.contract.keys import Key, parse_key
from kvpool_connector.contract.status import Status
from kvpool_connector.lookup_socket import MAX_KEYS, LookupServer, SocketLookup
from kvpool_connector.outage import Outage

LIMIT_S = 5.0
# How long drawing takes says nothing here.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FRAMED = st.binary(max_size=200).map(lambda body: len(body).to_bytes(4, "big") + body)


def packed(value: object) -> bytes:
    """A message of any content; integers beyond 64 bits do not exist in MessagePack."""
    try:
        body = msgspec.msgpack.encode(value)
    except OverflowError:
        body = b""
    return len(body).to_bytes(4, "big") + body


MESSAGES = st.binary(max_size=64) | FRAMED | JSON.map(packed)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fuzz") / "lookup"
    store = DictStore()
    store.objects["there"] = b"x"
    answering = LookupServer(store, path)
    yield path
    answering.close()


def say(path: Path, message: bytes) -> bytes:
    """What the server says to a client that sends this and then hangs up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(LIMIT_S)
        client.connect(str(path))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(message)
            client.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(65536):
                answer += part
        return answer


@patient
@given(message=MESSAGES)
def test_the_server_survives_any_message(server: Path, message: bytes) -> None:
    say(server, message)
    lookup = SocketLookup(server, Outage(ManualClock(), 5), LIMIT_S)
    assert lookup.exist(["there", "not"]) == [Status.OK, Status.MISS]
    lookup.close()


@pytest.mark.parametrize("head", [b"\xdd\xff\xff\xff\xff", b"\xdd" + (MAX_KEYS + 1).to_bytes(4, "big")])
def test_a_message_of_too_many_texts_is_refused_before_it_is_read(server: Path, head: bytes) -> None:
    body = head + b"\xa2ab" * (1 << 20)
    tracemalloc.start()
    assert say(server, len(body).to_bytes(4, "big") + body) == b""
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * len(body)


def test_a_message_that_is_too_long_is_refused_by_its_head(server: Path) -> None:
    assert say(server, b"\xff\xff\xff\xff" + bytes(1000)) == b""


def said(answer: bytes) -> list[Status] | None:
    """What a whole answer to two keys says; None for any other bytes."""
    size = int.from_bytes(answer[:4], "big")
    if len(answer) < 4 + size:
        return None
    try:
        values = msgspec.msgpack.decode(answer[4 : 4 + size])
    except msgspec.MsgspecError:
        return None
    known = {status.value: status for status in Status}
    if not isinstance(values, list) or len(values) != 2 or not all(isinstance(v, str) and v in known for v in values):
        return None
    return [known[value] for value in values]


ANSWERS = st.lists(st.sampled_from(["ok", "miss", "timeout", "OK", ""]), max_size=3).map(packed)


@patient
@given(answer=MESSAGES | ANSWERS)
def test_the_client_takes_no_answer_for_another(answer: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "lookup"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        lookup = SocketLookup(path, Outage(ManualClock(), 5), LIMIT_S)
        statuses = lookup.exist(["a", "b"])
        lookup.close()
        thread.join(LIMIT_S)
    assert statuses == (said(answer) or [Status.UNAVAILABLE] * 2)


NAMES = st.sampled_from(sorted(PoolSettings.model_fields)) | st.text(max_size=12)
SIZES = st.from_regex(r"\s*\d{1,400}(\.\d+)?\s*[kmgtKMGT]?i?[bB]?", fullmatch=True)


@patient
@given(values=st.dictionaries(NAMES, JSON | SIZES, max_size=6))
def test_any_settings_parse_or_are_named(values: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        found = PoolSettings.from_extra_config(values)
        assert PoolSettings.model_validate(found.model_dump()) == found


@patient
@given(
    values=st.dictionaries(st.sampled_from(sorted(StoreSettings.model_fields)) | st.text(), JSON | SIZES, max_size=6)
)
def test_any_store_settings_parse_or_are_named(values: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        parse(StoreSettings, {"master_server_address": "127.0.0.1:1"} | values, "fuzz")


@patient
@given(text=SIZES | st.text())
def test_any_size_parses_or_is_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_size(text) < 1 << 63


@patient
@given(text=st.binary(max_size=300))
def test_any_file_is_read_or_named(text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "mooncake.json"
    path.write_bytes(text)
    with contextlib.suppress(ConfigError):
        StoreSettings.from_environment({"MOONCAKE_CONFIG_PATH": str(path)})


@pytest.mark.parametrize("path", ["/dev/zero", "DEEP", "LARGE"])
def test_a_file_that_is_no_settings_is_named_and_not_read_to_its_end(path: str, tmp_path: Path) -> None:
    (tmp_path / "DEEP").write_text("[" * 500_000)
    (tmp_path / "LARGE").write_bytes(b'{"a": "' + b"a" * (8 << 20))
    tracemalloc.start()
    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH") as caught:
        StoreSettings.from_environment({"MOONCAKE_CONFIG_PATH": str(tmp_path / path)})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MIB
    assert len(str(caught.value)) < 1000


LONG = "a" * (1 << 20)


@pytest.mark.parametrize(
    "values",
    [
        {"kv_head_split": LONG},
        {"kv_head_split": [0] * (1 << 18)},
        {"prefill_pp_layer_partition": ("9," * (1 << 19))[:-1]},
        {"prefill_pp_layer_partition": "x," * (1 << 19)},
        {"staging_bytes": "9" * (1 << 20)},
        {"namespace": LONG},
        {LONG: 1},
    ],
    ids=lambda values: next(iter(values))[:30],
)
def test_settings_of_any_length_are_named_in_a_few_words_and_little_memory(values: dict[str, Any]) -> None:
    tracemalloc.start()
    error: ConfigError | None = None
    try:
        PoolSettings.from_extra_config(values)
    except ConfigError as raised:
        error = raised
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(str(error)) < 2000
    # Numbers of half a million layers are as many objects.
    assert peak < 64 * (1 << 20)


@pytest.mark.parametrize(
    "text",
    [
        "kvpool1/" + LONG,
        "/" * (1 << 20),
        "kvpool1/" + "%41" * (1 << 19) + "/0/" + "0" * 32 + "/ab",
        "kvpool1/a/" + "9" * (1 << 20) + "/" + "0" * 32 + "/ab",
        "kvpool1/a/0/" + "0" * 32 + "/" + "ab" * (1 << 19) + "+",
        "kvpool1/a/0/" + "0" * 32 + "/" + "ab" * (1 << 19) + "+" + "0" * (1 << 19),
    ],
    ids=range(6),
)
def test_texts_of_any_length_are_keys_or_not_in_little_memory(text: str) -> None:
    tracemalloc.start()
    with contextlib.suppress(KeyFormatError):
        parse_key(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB
    with pytest.raises(KeyFormatError) as caught:
        parse_key(text + "/")
    assert len(str(caught.value)) < 2000


KEYLIKE = st.lists(
    st.sampled_from(["kvpool1", "/", "0", "9" * 5000, "0" * 32, "descriptor", "ab", "+", "%2F", "%ff", "%", "A"])
    | st.text(max_size=4),
    max_size=12,
).map("".join)


@patient
@given(text=KEYLIKE | st.text())
def test_any_text_is_a_key_in_one_form_or_no_key(text: str) -> None:
    try:
        key = parse_key(text)
    except KeyFormatError:
        return
    assert str(key) == text


@pytest.mark.parametrize("epoch", ["9" * 19, "9" * 5000, "00", "-1", "\uff11"])
def test_an_epoch_has_at_most_eighteen_digits(epoch: str) -> None:
    with pytest.raises(KeyFormatError):
        parse_key(f"kvpool1/a/{epoch}/{'0' * 32}/ab")


@patient
@given(namespace=st.text(min_size=1, max_size=128).filter(lambda s: s.isprintable() or s.isascii()))
def test_no_name_leaves_its_place_in_the_key(namespace: str) -> None:
    text = str(Key(namespace, 3, "0" * 32, b"ab"))
    assert text.count("/") == 4
    assert parse_key(text).namespace == namespace


@patient
@given(value=JSON | st.fixed_dictionaries(dict.fromkeys(Descriptor.__dataclass_fields__, JSON)))
def test_any_document_is_a_descriptor_or_refused(value: object) -> None:
    with contextlib.suppress(DescriptorError):
        text = json.dumps(value)
        assert Descriptor.from_json(text).to_json() == text


@patient
@given(text=st.binary(max_size=300))
def test_any_bytes_are_a_descriptor_or_refused(text: bytes) -> None:
    with contextlib.suppress(DescriptorError):
        Descriptor.from_json(text)
