"""`verify`: objects against their descriptor and, where they carry one, their checksum. Nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_connector.cli.checksums import ALGORITHMS, differing
from kvpool_connector.cli.contents import foreign_lines
from kvpool_connector.cli.inventory import parsed, read_descriptors, take_inventory
from kvpool_connector.cli.output import Answer, CommandError, Exit, Rows
from kvpool_connector.cli.session import Session
from kvpool_connector.contract.descriptor import Descriptor
from kvpool_connector.contract.keys import Key
from kvpool_connector.contract.store import Store


def verify(session: Session, texts: Sequence[str], namespace: str | None, *, read: bool) -> Answer:
    """Check named keys, or all of a namespace. Without `read` only sizes are compared, and no object is leased."""
    if bool(texts) == bool(namespace):
        raise CommandError("name keys, or a namespace with --namespace NAME; not both")
    named = [parsed(text) for text in texts]
    endpoint = session.master_endpoint()
    inventory = take_inventory(endpoint.keys() if namespace else texts)
    shards = inventory.of(namespace)
    if namespace and not shards and not inventory.foreign_in(namespace):
        raise CommandError(f"the pool holds nothing of namespace {namespace!r}; `kvpool stat` lists what it holds")
    faults: list[tuple[str, str]] = []
    unchecked: list[str] = []
    checked = compared = 0
    total = sum(len(objects.blocks) for objects in shards)
    with session.store() as store:
        for objects in shards:
            if not namespace:
                objects.trouble = "descriptor not read"
            read_descriptors(store, endpoint, [objects])
            keys = objects.blocks
            if objects.descriptor is None:
                kind = faults if "corrupt" in objects.trouble or "another's" in objects.trouble else None
                if kind is not None:
                    kind.append((objects.shard.descriptor_key(), objects.trouble))
                else:
                    known = endpoint.sizes([str(key) for key in keys])
                    faults += [(str(key), "not in the pool") for key in keys if not namespace and str(key) not in known]
                    unchecked.append(f"{objects.shard.descriptor_key()}: {objects.trouble}; {len(keys)} unchecked")
                continue
            checked += len(keys) + 1
            sizes = endpoint.sizes([str(key) for key in keys])
            for key in keys:
                why = _fault(store, key, sizes.get(str(key)), objects.descriptor, read=read)
                faults += [(str(key), why)] if why else []
                compared += 1
                session.tell("comparing", compared, total)
    foreign = inventory.foreign_in(namespace)
    lines = [f"{checked} objects checked{'' if read else ' by size'}, {len(faults)} wrong", *unchecked]
    plain = sum(len(o.blocks) for o in shards if o.descriptor and not o.descriptor.checksum)
    if plain and read:
        lines.append(f"{plain} of them carry no checksum, so only their size was checked (setting `integrity`)")
    if faults:
        lines.append("A wrong object is a miss or a failed block to every engine, never an answer; nothing was changed")
    exit_ = Exit.ERROR if faults or foreign else Exit.LOOK if unchecked else Exit.WELL
    return Answer(
        {
            "checked": checked,
            "without_checksum": plain,
            "named": len(named),
            "wrong": [{"key": key, "why": why} for key, why in faults],
            "unchecked": unchecked,
            "foreign": foreign,
        },
        [Rows("wrong objects", ("key", "why"), list(faults))] if faults else [],
        lines + foreign_lines(foreign),
        exit_,
    )


def _fault(store: Store, key: Key, size: int | None, descriptor: Descriptor, *, read: bool) -> str:
    expected = descriptor.object_bytes
    if size is None:
        return "not in the pool"
    if size != expected:
        return f"has {size} bytes; its descriptor promises {expected}"
    if not read:
        return ""
    status, value = store.read(str(key))
    if not status.ok:
        return f"cannot be read: {status.value}"
    if len(value) != expected:
        return f"{len(value)} bytes were read of {expected}"
    if not descriptor.checksum:
        return ""
    if descriptor.checksum not in ALGORITHMS:
        return f"carries checksums {descriptor.checksum!r}, which this release does not know"
    wrong = differing(descriptor, value)
    return f"{len(wrong)} components are not what was saved: {', '.join(wrong[:8])}" if wrong else ""
