"""What one object of a shard contains, in words that do not depend on who wrote it; its hash is the fingerprint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from kvpool_connector.contract.layout import ShardLayout
from kvpool_connector.contract.topology import ContextRange, HeadRange

FORMAT_VERSION = 1
"""Version of the object format and of the descriptor. Any change of either raises it."""


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

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits: BLAKE2b-128 of the canonical JSON."""
        return hashlib.blake2b(self.to_json().encode("ascii"), digest_size=16).hexdigest()
