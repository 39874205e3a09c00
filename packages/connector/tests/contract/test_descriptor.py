"""A descriptor says what a layout holds, in one canonical form."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from kvpool_connector.contract.descriptor import ComponentContent, Descriptor, ModelIdentity
from kvpool_connector.contract.errors import DescriptorError
from kvpool_connector.contract.layout import Component, Layer, ShardLayout
from kvpool_connector.contract.topology import ContextRange, HeadRange

LAYOUT = ShardLayout(
    group=3,
    block_size=16,
    num_blocks=2,
    layers=(
        Layer(
            "7",
            ("model.layers.7",),
            (
                Component("k_nope", "bfloat16", (16, 1, 4), "NHD", 4096, 128, 128),
                Component("k_pe", "float16", (16, 1, 2), "NZ", 8192, 64, 64),
            ),
        ),
        Layer("mtp.0", ("model.mtp",), (Component("k_nope", "int8", (16, 1, 4), "HND", 0, 64, 64),)),
    ),
)
MODEL = ModelIdentity("modèle", "r1", "bfloat16", "w8a8", "int8")


@pytest.fixture
def descriptor() -> Descriptor:
    return Descriptor.of(LAYOUT, MODEL, HeadRange(0, 1, 1), ContextRange(1, 2, 128))


def test_everything_of_the_layout_but_its_addresses_is_said(descriptor: Descriptor) -> None:
    said = json.loads(descriptor.to_json())
    assert said["model"] == {
        "name": "modèle",
        "revision": "r1",
        "compute_dtype": "bfloat16",
        "quantization": "w8a8",
        "cache_dtype": "int8",
    }
    assert (said["group"], said["block_size"]) == (3, 16)
    assert said["heads"] == {"first": 0, "count": 1, "total": 1}
    assert said["context"] == {"position": 1, "size": 2, "interleave": 128}
    assert said["layers"] == [
        {
            "label": "7",
            "components": [
                {"name": "k_nope", "dtype": "bfloat16", "page_shape": [16, 1, 4], "order": "NHD"},
                {"name": "k_pe", "dtype": "float16", "page_shape": [16, 1, 2], "order": "NZ"},
            ],
        },
        {
            "label": "mtp.0",
            "components": [{"name": "k_nope", "dtype": "int8", "page_shape": [16, 1, 4], "order": "HND"}],
        },
    ]
    for address in ("4096", "8192"):
        assert address not in descriptor.to_json()


def test_the_form_is_canonical(descriptor: Descriptor) -> None:
    """Sorted, without white space, ASCII: another spelling of the same content would be another fingerprint."""
    text = descriptor.to_json()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert text.isascii()
    assert descriptor.fingerprint == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def test_from_json_is_the_inverse(descriptor: Descriptor) -> None:
    text = descriptor.to_json()
    assert Descriptor.from_json(text) == Descriptor.from_json(text.encode()) == descriptor
    assert Descriptor.from_json(text).fingerprint == descriptor.fingerprint


def test_the_bytes_of_an_object_follow(descriptor: Descriptor) -> None:
    assert descriptor.object_bytes == LAYOUT.object_bytes == 128 + 64 + 64
    assert replace(descriptor, checksum="xxh3-64").object_bytes == LAYOUT.object_bytes + 3 * 8


def test_a_descriptor_with_checksums_is_read_back(descriptor: Descriptor) -> None:
    sealed = Descriptor.of(LAYOUT, MODEL, HeadRange(0, 1, 1), ContextRange(1, 2, 128), "xxh3-64")
    assert sealed == replace(descriptor, checksum="xxh3-64")
    assert Descriptor.from_json(sealed.to_json()) == sealed


@pytest.mark.parametrize(("dtype", "size"), [("float8_e4m3fn", 1), ("float32", 4), ("uint8", 1), ("float16", 2)])
def test_bytes_of_a_page(dtype: str, size: int) -> None:
    assert ComponentContent("k", dtype, (3, 5), "NHD").page_bytes == 15 * size


def test_a_dtype_of_unknown_size_is_refused() -> None:
    with pytest.raises(DescriptorError, match="component 'k': the size of dtype 'complex7' is not known"):
        _ = ComponentContent("k", "complex7", (3,), "NHD").page_bytes


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", "7", '"x"', b"\xff", "[" * 100_000, "\udc00", '{"model": 1}'],
    ids=lambda text: repr(text)[:12],
)
def test_other_texts_are_refused(text: str | bytes) -> None:
    with pytest.raises(DescriptorError, match="not a descriptor"):
        Descriptor.from_json(text)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("group", "3"),
        ("group", -1),
        ("block_size", 1.0),
        ("format_version", True),
        ("heads", {"first": 0, "count": 1, "total": 1 << 48}),
        ("context", {"position": 0, "size": 1}),
        ("layers", [{"label": 7, "components": []}]),
        ("layers", [{"label": "7", "components": [], "more": 1}]),
        ("model", {"name": None}),
        ("checksum", ""),
        ("checksum", 8),
        ("more", 1),
    ],
)
def test_every_part_has_its_type(descriptor: Descriptor, part: str, value: object) -> None:
    found = json.loads(descriptor.to_json()) | {part: value}
    with pytest.raises(DescriptorError, match="not a descriptor"):
        Descriptor.from_json(json.dumps(found, sort_keys=True, separators=(",", ":")))


def test_the_wrong_part_is_named(descriptor: Descriptor) -> None:
    found = json.loads(descriptor.to_json()) | {"group": -17}
    with pytest.raises(DescriptorError, match="not a descriptor: TypeError: -17 is neither a count nor a text"):
        Descriptor.from_json(json.dumps(found, sort_keys=True, separators=(",", ":")))


def test_another_form_is_refused(descriptor: Descriptor) -> None:
    with pytest.raises(DescriptorError, match="canonical form"):
        Descriptor.from_json(json.dumps(json.loads(descriptor.to_json())))
