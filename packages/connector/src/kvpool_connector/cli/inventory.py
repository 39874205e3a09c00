"""What the pool holds: keys by namespace and fingerprint, and the descriptors that the fingerprints stand for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool_connector.cli.endpoint import MasterEndpoint
from kvpool_connector.cli.output import CommandError
from kvpool_connector.contract.descriptor import Descriptor
from kvpool_connector.contract.errors import DescriptorError, KeyFormatError
from kvpool_connector.contract.keys import PREFIX, Key, parse_key
from kvpool_connector.contract.shards import Shard
from kvpool_connector.contract.store import Store

MAX_DESCRIPTOR_BYTES = 8 << 20
"""One of a hundred layers has some 60 KB."""


@dataclass
class ShardObjects:
    """The objects of one shard, and what the pool says that they contain."""

    shard: Shard
    blocks: list[Key] = field(default_factory=list)
    descriptor: Descriptor | None = None
    trouble: str = ""
    """Why there is no descriptor."""


@dataclass
class Inventory:
    """All keys of a pool, sorted."""

    shards: dict[Shard, ShardObjects]
    hashings: list[Key]
    """Where a namespace says how its block hashes are made."""
    foreign: list[str]
    """Keys under our prefix that are not of our grammar."""
    num_others: int
    """Keys that do not claim to be ours."""

    def of(self, namespace: str | None) -> list[ShardObjects]:
        """The shards of a namespace (all of them for None), in order."""
        return [
            objects
            for shard, objects in sorted(self.shards.items(), key=lambda item: _order(item[0]))
            if namespace is None or shard.namespace == namespace
        ]

    def foreign_in(self, namespace: str | None) -> list[str]:
        """Foreign keys that claim to belong to a namespace (to any, for None)."""
        if namespace is None:
            return self.foreign
        prefix = str(Key(namespace, 0, "0" * 32)).split("/0/")[0] + "/"
        return [key for key in self.foreign if key.startswith(prefix)]


def _order(shard: Shard) -> tuple[str, int, str]:
    return shard.namespace, shard.epoch, shard.fingerprint


def take_inventory(keys: Iterable[str]) -> Inventory:
    """Sort keys by what they say of themselves."""
    shards: dict[Shard, ShardObjects] = {}
    hashings: list[Key] = []
    foreign: list[str] = []
    num_others = 0
    for text in keys:
        if not text.startswith(f"{PREFIX}/"):
            num_others += 1
            continue
        try:
            key = parse_key(text)
        except KeyFormatError:
            foreign.append(text)
            continue
        if not key.fingerprint:
            # The marker of a reset is not listed: without it an engine that starts would reach what was reset.
            if key.name == "hashing":
                hashings.append(key)
            continue
        shard = Shard(key.namespace, key.epoch, key.fingerprint)
        objects = shards.setdefault(shard, ShardObjects(shard, trouble="no descriptor object in the pool"))
        if key.block_hash:
            objects.blocks.append(key)
        else:
            objects.trouble = "descriptor not read"
    return Inventory(shards, hashings, sorted(foreign), num_others)


def read_descriptors(store: Store, endpoint: MasterEndpoint, shards: Sequence[ShardObjects]) -> None:
    """Decode each shard's descriptor, or note in words why it cannot be. What is too large is not read."""
    sizes = endpoint.sizes([objects.shard.descriptor_key() for objects in shards])
    for objects in shards:
        if objects.trouble == "no descriptor object in the pool":
            continue
        size = sizes.get(objects.shard.descriptor_key(), 0)
        if size > MAX_DESCRIPTOR_BYTES:
            objects.trouble = f"its descriptor object is corrupt: {size} bytes, at most {MAX_DESCRIPTOR_BYTES}"
            continue
        status, value = store.read(objects.shard.descriptor_key())
        if not status.ok:
            objects.trouble = f"its descriptor could not be read: {status.value}"
            continue
        try:
            descriptor = Descriptor.from_json(value)
            _ = descriptor.object_bytes
        except DescriptorError as error:
            objects.trouble = f"its descriptor object is corrupt: {error}"
            continue
        if descriptor.fingerprint != objects.shard.fingerprint:
            objects.trouble = f"its descriptor object is another's: it hashes to {descriptor.fingerprint}"
            continue
        objects.descriptor, objects.trouble = descriptor, ""


def parsed(text: str) -> Key:
    """A key that a user named. Raises `CommandError`."""
    try:
        return parse_key(text)
    except KeyFormatError as error:
        raise CommandError(f"{error}. `kvpool ls` lists the keys of the pool") from error


def layers_in_words(descriptor: Descriptor) -> str:
    """`61 layers 0..60, mtp.0`: runs of numbered layers, then the others."""
    labels = [layer.label for layer in descriptor.layers]
    numbers = sorted({int(label) for label in labels if label.isdigit() and len(label) < 9})
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [f"{first}..{last}" if last > first else f"{first}" for first, last in runs]
    words += [label for label in labels if not label.isdigit()]
    return f"{len(labels)} layers {', '.join(words)}"


def components_in_words(descriptor: Descriptor) -> str:
    """`k_nope bfloat16 (128, 1, 512) NHD x61, ...`: each distinct component, and how many layers have it."""
    counts: dict[str, int] = defaultdict(int)
    for layer in descriptor.layers:
        for c in layer.components:
            counts[f"{c.name} {c.dtype} {c.page_shape} {c.order}"] += 1
    return ", ".join(f"{words} x{count}" for words, count in counts.items())


def share_in_words(descriptor: Descriptor) -> str:
    """Which part of a block the shard is, without naming ranks: group, heads, tokens, layers."""
    heads, context = descriptor.heads, descriptor.context
    words = [f"group {descriptor.group}"]
    if heads.count < heads.total:
        words.append(f"KV heads {heads.first}..{heads.first + heads.count - 1} of {heads.total}")
    if context.size > 1:
        words.append(f"context part {context.position} of {context.size} (runs of {context.interleave})")
    return ", ".join([*words, layers_in_words(descriptor)])


def decoded(descriptor: Descriptor) -> dict[str, object]:
    """A descriptor for a JSON document, layers in a sentence."""
    model = descriptor.model
    return {
        "model": vars(model),
        "group": descriptor.group,
        "block_size": descriptor.block_size,
        "heads": vars(descriptor.heads),
        "context": vars(descriptor.context),
        "layers": layers_in_words(descriptor),
        "components": components_in_words(descriptor),
        "object_bytes": descriptor.object_bytes,
        "format_version": descriptor.format_version,
        "checksum": descriptor.checksum,
    }
