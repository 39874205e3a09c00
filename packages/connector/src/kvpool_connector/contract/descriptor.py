"""What one object of a shard contains, in words that do not depend on who wrote it; its hash is the fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from kvpool_connector.contract.device import CHECKSUM_BYTES
from kvpool_connector.contract.errors import DescriptorError
from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.contract.topology import ContextRange, HeadRange

FORMAT_VERSION = 1
"""Version of the object format and of the descriptor. Any change of either raises it."""


DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
"""Bytes of an element; `float8_...` types have one."""


@dataclass(frozen=True)
class ModelIdentity:
    """What decides the values of the KV cache: which weights, computed how."""

    name: str
    revision: str = ""
    compute_dtype: str = ""
    quantization: str = ""
    cache_dtype: str = ""


@dataclass(frozen=True)
class ComponentContent:
    """A component without its addresses."""

    name: str
    dtype: str
    page_shape: tuple[int, ...]
    order: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one block. Raises `DescriptorError` for an element type of unknown size."""
        size = 1 if self.dtype.startswith("float8_") else DTYPE_BYTES.get(self.dtype)
        if size is None:
            raise DescriptorError(f"component {self.name!r}: the size of dtype {self.dtype!r} is not known")
        return math.prod(self.page_shape) * size


@dataclass(frozen=True)
class LayerContent:
    """A layer without its addresses."""

    label: str
    components: tuple[ComponentContent, ...]


@dataclass(frozen=True)
class Descriptor:
    """The content of a shard's objects. Two ranks, engines or deployments share exactly what has equal descriptors."""

    model: ModelIdentity
    group: int
    block_size: int
    heads: HeadRange
    context: ContextRange
    layers: tuple[LayerContent, ...]
    format_version: int = FORMAT_VERSION
    checksum: str = ""
    """Algorithm of the checksums behind the pages; empty, and absent from the JSON, where there are none."""

    @classmethod
    def of(
        cls, layout: ShardLayout, model: ModelIdentity, heads: HeadRange, context: ContextRange, checksum: str = ""
    ) -> Descriptor:
        """The descriptor of what `layout` holds."""
        return cls(
            model=model,
            group=layout.group,
            block_size=layout.block_size,
            heads=heads,
            context=context,
            layers=tuple(
                LayerContent(
                    layer.label,
                    tuple(ComponentContent(c.name, c.dtype, c.page_shape, c.order) for c in layer.components),
                )
                for layer in layout.layers
            ),
            checksum=checksum,
        )

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no white space, ASCII."""
        said = asdict(self)
        if not self.checksum:
            del said["checksum"]
        return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Descriptor:
        """The inverse of `to_json`. Raises `DescriptorError` for any text that `to_json` would not print."""
        try:
            found = json.loads(text)
            descriptor = cls(
                model=ModelIdentity(**found.pop("model")),
                heads=HeadRange(**found.pop("heads")),
                context=ContextRange(**found.pop("context")),
                layers=tuple(_layer_of(layer) for layer in found.pop("layers")),
                **found,
            )
            _check_types(descriptor)
            canonical = descriptor.to_json().encode() == (text.encode() if isinstance(text, str) else text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DescriptorError(f"not a descriptor: {type(error).__name__}: {str(error)[:200]}") from error
        if not canonical:
            raise DescriptorError("not a descriptor in canonical form")
        return descriptor

    @property
    def object_bytes(self) -> int:
        """Bytes of one object: all pages, one after the other, and the checksums behind them."""
        components = [component for layer in self.layers for component in layer.components]
        trailer = CHECKSUM_BYTES * len(components) if self.checksum else 0
        return sum(component.page_bytes for component in components) + trailer

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits: BLAKE2b-128 of the canonical JSON."""
        return hashlib.blake2b(self.to_json().encode("ascii"), digest_size=16).hexdigest()


def _layer_of(found: dict[str, Any]) -> LayerContent:
    components = tuple(
        ComponentContent(**(component | {"page_shape": tuple(component["page_shape"])}))
        for component in found["components"]
    )
    return LayerContent(**(found | {"components": components}))


def _check_types(descriptor: Descriptor) -> None:
    components = [component for layer in descriptor.layers for component in layer.components]
    counts = [descriptor.group, descriptor.block_size, descriptor.format_version, *asdict(descriptor.heads).values()]
    counts += asdict(descriptor.context).values()
    counts += [n for component in components for n in component.page_shape]
    texts = [descriptor.checksum, *asdict(descriptor.model).values(), *(layer.label for layer in descriptor.layers)]
    texts += [text for component in components for text in (component.name, component.dtype, component.order)]
    wrong = [n for n in counts if not (type(n) is int and 0 <= n < 1 << 48)] + [t for t in texts if type(t) is not str]
    if wrong:
        raise TypeError(f"{wrong[0]!r} is neither a count nor a text")
