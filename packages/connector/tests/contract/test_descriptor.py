"""A descriptor says what a layout holds, in one canonical form."""

from __future__ import annotations

import hashlib
import json

import pytest

from kvpool_connector.contract.descriptor import Descriptor, ModelIdentity
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
