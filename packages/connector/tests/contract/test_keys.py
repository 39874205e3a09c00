"""The grammar of keys: printer and parser are each other's inverse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_connector.contract.errors import KeyFormatError
from kvpool_connector.contract.keys import Key, parse_key, tag_of

hex_digits = st.text("0123456789abcdef", min_size=32, max_size=32)
namespaces = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(namespaces, st.integers(0, 10**9), hex_digits, st.binary(max_size=40), st.sampled_from(["", "0123456789abcdef"]))
def test_parsing_undoes_printing(namespace: str, epoch: int, fingerprint: str, block_hash: bytes, tag: str) -> None:
    key = Key(namespace, epoch, fingerprint, block_hash, tag if block_hash else "")
    assert parse_key(str(key)) == key
    assert str(key).count("/") == 4


@given(namespaces, st.integers(0, 10**9), st.sampled_from(["reset", "hashing"]))
def test_objects_of_a_namespace_have_keys_too(namespace: str, epoch: int, name: str) -> None:
    key = Key(namespace, epoch, name=name)
    assert parse_key(str(key)) == key
    assert str(key).endswith(f"/{epoch}/{name}")


@given(
    st.text(max_size=80)
    | st.from_regex(r"kvpool1/[a-z%0-9]{1,6}/[0-9]{1,3}/[0-9a-f]{32}/[0-9a-z+]{0,20}", fullmatch=True)
)
def test_a_text_is_refused_or_printed_back(text: str) -> None:
    try:
        key = parse_key(text)
    except KeyFormatError:
        return
    assert str(key) == text


def test_names_cannot_break_the_grammar() -> None:
    assert str(Key("a/b", 0, "0" * 32)) == f"kvpool1/a%2Fb/0/{'0' * 32}/descriptor"
    assert str(Key("a/b", 1, name="reset")) == "kvpool1/a%2Fb/1/reset"
    assert str(Key("a", 0, "0" * 32, b"x")) != str(Key("a/0", 0, "0" * 32, b"x"))


def test_b5_an_adapter_and_a_salt_of_one_name_are_apart() -> None:
    tags = [
        tag_of(),
        tag_of(lora="X"),
        tag_of(salt="X"),
        tag_of(lora="X", salt="X"),
        tag_of(lora="Y"),
        tag_of(salt="Y"),
    ]
    assert len(set(tags)) == len(tags)
    assert tag_of(lora="X") == tag_of(lora="X", salt=None) == tag_of(lora="X", salt="")


def test_a_namespace_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(KeyFormatError, match=r"'kvpool1/%ff/0/.*': the namespace is not percent-encoded UTF-8"):
        parse_key(f"kvpool1/%ff/0/{'0' * 32}/00")


def test_another_spelling_is_refused_with_the_right_one() -> None:
    with pytest.raises(KeyFormatError, match=rf"'kvpool1/%61/0/.*expected 'kvpool1/a/0/{'0' * 32}/00'"):
        parse_key(f"kvpool1/%61/0/{'0' * 32}/00")


@pytest.mark.parametrize("text", ["x" * 999, "kvpool1/%ff" + "f" * 999, "kvpool1/%61" + "a" * 999])
def test_refusals_quote_no_more_than_two_hundred_characters(text: str) -> None:
    with pytest.raises(KeyFormatError) as refusal:
        parse_key(text if text[0] == "x" else f"{text}/0/{'0' * 32}/00")
    assert repr(text[:200]) in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["", "kvpool1/a/0/x/y", "kvpool2/a/0/" + "0" * 32 + "/00", "kvpool1/a/01/" + "0" * 32 + "/00"]
)
def test_refusals_say_what_was_found(text: str) -> None:
    with pytest.raises(KeyFormatError, match="expected"):
        parse_key(text)
