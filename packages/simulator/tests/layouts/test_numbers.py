"""Bytes and buffers of whole models, as published: a test a number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool_simulator.layouts import NUMBERS, Number

PUBLISHED: list[tuple[list[int], int, int, int, tuple[int, int] | None]] = [
    # components, a layer, a block, buffers, the last two with MTP; in the order of NUMBERS
    ([131_072, 16_384], 147_456, 8_994_816, 122, (9_142_272, 124)),
    ([131_072, 16_384, 32_768], 180_224, 10_993_664, 183, (11_173_888, 186)),
    ([131_072, 16_384, 16_384, 256], 164_096, 10_009_856, 244, (10_173_952, 248)),
    ([131_072, 16_384, 16_384, 512], 164_352, 10_025_472, 244, (10_189_824, 248)),
    ([83_968, 16_384, 256], 100_608, 6_137_088, 183, (6_237_696, 186)),
    ([262_144] * 2, 524_288, 33_554_432, 128, None),
    ([65_536] * 2, 131_072, 8_388_608, 128, None),
    ([32_768] * 2, 65_536, 4_194_304, 128, None),
    ([32_768] * 2, 65_536, 4_194_304, 128, None),
    ([131_072] * 2, 262_144, 24_641_536, 188, None),
    ([32_768] * 2, 65_536, 6_160_384, 188, None),
    ([32_768] * 2, 65_536, 6_160_384, 188, None),
    ([32_768] * 2, 65_536, 6_160_384, 188, None),
]


def facts() -> Iterator[object]:
    """A model, what of it, and the number."""
    for number, (components, layer, block, buffers, mtp) in zip(NUMBERS, PUBLISHED, strict=True):
        said = [(f"component {i}", size) for i, size in enumerate(components)]
        said += [("components", len(components)), ("layer", layer), ("block", block), ("buffers", buffers)]
        said += [("block with MTP", mtp[0]), ("buffers with MTP", mtp[1])] if mtp else []
        for what, expected in said:
            yield pytest.param(number, what, expected, id=f"{number.title}: {what}")


@pytest.mark.parametrize(("number", "what", "expected"), list(facts()))
def test_published_number(number: Number, what: str, expected: int) -> None:
    spec = number.spec(mtp=what.endswith("with MTP"))
    components = number.components
    found = {
        **{f"component {i}": size for i, size in enumerate(components)},
        "components": len(components),
        "layer": sum(components),
        "block": spec.block_bytes,
        "block with MTP": spec.block_bytes,
        "buffers": spec.num_buffers,
        "buffers with MTP": spec.num_buffers,
    }
    assert found[what] == expected


def test_mtp_is_asked_for_wherever_a_model_has_it() -> None:
    assert [number.has_mtp for number in NUMBERS] == [mtp is not None for *_, mtp in PUBLISHED]
