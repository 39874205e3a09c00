"""The checksums behind an object's pages, made again from its bytes (docs/keys.md has the formats)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from kvpool_connector.contract.descriptor import Descriptor
from kvpool_connector.contract.device import CHECKSUM_BYTES


def sum_64(page: bytes) -> bytes:
    """Each 64-bit little-endian word times its own odd number, summed modulo 2**64; the page filled up with zeros."""
    words = np.frombuffer(page + bytes(-len(page) % CHECKSUM_BYTES), "<u8")
    factors = np.arange(len(words), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return int((words * factors).sum(dtype=np.uint64)).to_bytes(CHECKSUM_BYTES, "little")


ALGORITHMS: dict[str, Callable[[bytes], bytes]] = {"xxh3-64": xxhash.xxh3_64_digest, "sum-64": sum_64}


def differing(descriptor: Descriptor, value: bytes) -> list[str]:
    """Names (`layer.component`) of the components whose checksum is not the one that the object carries.

    `value` has `descriptor.object_bytes` bytes, `descriptor.checksum` is one of `ALGORITHMS`.
    """
    digest = ALGORITHMS[descriptor.checksum]
    components = [(layer.label, component) for layer in descriptor.layers for component in layer.components]
    trailer = len(value) - CHECKSUM_BYTES * len(components)
    wrong, start = [], 0
    for i, (label, component) in enumerate(components):
        page = value[start : start + component.page_bytes]
        start += component.page_bytes
        stored = value[trailer + i * CHECKSUM_BYTES : trailer + (i + 1) * CHECKSUM_BYTES]
        if digest(page) != stored:
            wrong.append(f"{label}.{component.name}")
    return wrong
