"""`ls` and `stat`: what the pool holds, and how full it is."""

from __future__ import annotations

from kvpool_connector.cli.inventory import Inventory, ShardObjects, decoded, read_descriptors, share_in_words
from kvpool_connector.cli.inventory import take_inventory as take
from kvpool_connector.cli.output import Answer, Exit, Rows, in_bytes
from kvpool_connector.cli.session import Session
from kvpool_connector.contract.keys import parse_key

COUNTERS = {
    "evicted objects": "master_evicted_key_count",
    "evicted bytes": "master_evicted_size_bytes",
    "evictions attempted": "master_attempted_evictions_total",
    "evictions that freed something": "master_successful_evictions_total",
    "puts refused for lack of room": "master_put_start_alloc_failures_total",
    "objects refused in batches of puts": "master_batch_put_start_failed_items_total",
    "writes begun and given up": "master_put_start_discard_cnt",
}
"""Words for the master's counters."""


def list_objects(session: Session, namespace: str | None, limit: int) -> Answer:
    """The pool's objects with their sizes, at most `limit`."""
    endpoint = session.master_endpoint()
    inventory = take(endpoint.keys())
    shards = inventory.of(namespace)
    keys = [str(key) for objects in shards for key in objects.blocks]
    shown = keys[:limit]
    sizes = endpoint.sizes(shown)
    foreign = inventory.foreign_in(namespace)
    rows = Rows("objects", ("key", "bytes"), [(key, sizes.get(key, "gone")) for key in shown])
    lines = [f"{len(keys)} objects, {len(shown)} shown; {inventory.num_others} keys in the store are not KVPool's"]
    return Answer(
        {
            "objects": [{"key": key, "bytes": sizes.get(key), **_parts(key)} for key in shown],
            "num_objects": len(keys),
            "foreign": foreign,
            "num_other_keys": inventory.num_others,
        },
        [rows] if shown else [],
        lines + foreign_lines(foreign),
        Exit.ERROR if foreign else Exit.WELL,
    )


def _parts(text: str) -> dict[str, object]:
    """What a key says of its object; `stat` says what the fingerprint stands for."""
    key = parse_key(text)
    return {"namespace": key.namespace, "epoch": key.epoch, "fingerprint": key.fingerprint}


def foreign_lines(foreign: list[str]) -> list[str]:
    """What to say of keys under our prefix that are not ours: at most three of them."""
    if not foreign:
        return []
    sample = ", ".join(repr(key[:120]) for key in foreign[:3])
    return [
        f"{len(foreign)} foreign objects lie under KVPool's prefix, e.g. {sample}: no KVPool wrote them and none reads "
        "them. Find out who does; they are left alone here"
    ]


def pool_status(session: Session, namespace: str | None) -> Answer:
    """What is in the pool by shard, and the master's view of room and evictions."""
    endpoint = session.master_endpoint()
    inventory = take(endpoint.keys())
    shards = inventory.of(namespace)
    sizes = {id(o): endpoint.sizes([str(key) for key in o.blocks]) for o in shards}
    if shards:
        with session.store() as store:
            read_descriptors(store, endpoint, shards)
    metrics = endpoint.metrics()
    segments = endpoint.segments()
    capacity, used = sum(s.num_bytes for s in segments), sum(s.used_bytes for s in segments)
    counters = {words: int(metrics[name]) for words, name in COUNTERS.items() if name in metrics}
    foreign = inventory.foreign_in(namespace)
    troubled = [o for o in shards if "corrupt" in o.trouble or "another's" in o.trouble]
    tables = [_shard_rows(shards, {key: sum(found.values()) for key, found in sizes.items()})] if shards else []
    tables.append(
        Rows(
            "memory",
            ("segment", "transport", "size", "used", "state"),
            [(s.name, s.protocol, in_bytes(s.num_bytes), in_bytes(s.used_bytes), s.status) for s in segments],
        )
    )
    tables.append(Rows("since the master started", ("", ""), list(counters.items())))
    lines = [f"{in_bytes(used)} of {in_bytes(capacity)} in use, {int(metrics.get('master_active_clients', 0))} clients"]
    lines += [f"{objects.shard.fingerprint}: {objects.trouble}" for objects in shards if objects.trouble]
    return Answer(
        {
            "shards": [_shard_data(o, sizes[id(o)]) for o in shards],
            "segments": [vars(segment) for segment in segments],
            "capacity_bytes": capacity,
            "used_bytes": used,
            "counters": {COUNTERS[words]: count for words, count in counters.items()},
            "leases": "Mooncake 0.3.13 does not say which objects are leased; asking for one would lease it",
            "ages": "Mooncake 0.3.13 does not say when an object was written or read",
            "foreign": foreign,
            "num_other_keys": inventory.num_others,
        },
        tables,
        lines + foreign_lines(foreign),
        _exit(inventory, segments, foreign, troubled),
    )


def _exit(inventory: Inventory, segments: object, foreign: list[str], troubled: list[ShardObjects]) -> Exit:
    if foreign or troubled:
        return Exit.ERROR
    return Exit.WELL if segments else Exit.LOOK


def _shard_rows(shards: list[ShardObjects], sizes: dict[int, int]) -> Rows:
    rows = Rows("shards", ("namespace", "epoch", "fingerprint", "what", "model", "objects", "bytes"))
    for objects in shards:
        descriptor = objects.descriptor
        rows.rows.append(
            (
                objects.shard.namespace,
                objects.shard.epoch,
                objects.shard.fingerprint[:12],
                share_in_words(descriptor) if descriptor else "?",
                f"{descriptor.model.name} {descriptor.model.cache_dtype}".strip() if descriptor else "?",
                len(objects.blocks),
                in_bytes(sizes[id(objects)]),
            )
        )
    return rows


def _shard_data(objects: ShardObjects, sizes: dict[str, int]) -> dict[str, object]:
    return {
        **vars(objects.shard),
        "num_objects": len(objects.blocks),
        "bytes": sum(sizes.values()),
        "descriptor": decoded(objects.descriptor) if objects.descriptor else None,
        "trouble": objects.trouble,
    }
