"""`clear`: removes what one namespace has in the pool, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvpool_connector.cli.contents import foreign_lines
from kvpool_connector.cli.inventory import take_inventory
from kvpool_connector.cli.output import Answer, CommandError, Exit
from kvpool_connector.cli.session import Session
from kvpool_connector.contract.status import Status

KEYS_PER_CALL = 1000


def clear(
    session: Session,
    namespace: str,
    *,
    confirm: Callable[[str], bool],
    force: bool,
    leave_foreign: bool,
) -> Answer:
    """Remove the namespace's objects, blocks before descriptors. `confirm` is asked first, with a sentence.

    `force` also removes objects that somebody reads now.
    """
    inventory = take_inventory(session.master_endpoint().keys())
    foreign = inventory.foreign_in(namespace)
    if foreign and not leave_foreign:
        raise CommandError(
            f"{foreign_lines(foreign)[0]}. Nothing was removed; with --leave-foreign KVPool's own objects of the "
            "namespace are removed and the foreign ones stay"
        )
    shards = inventory.of(namespace)
    hashings = [str(key) for key in inventory.hashings if key.namespace == namespace]
    if not shards and not hashings:
        raise CommandError(f"the pool holds nothing of namespace {namespace!r}; `kvpool stat` lists what it holds")
    keys = [str(key) for objects in shards for key in objects.blocks]
    keys += [objects.shard.descriptor_key() for objects in shards] + hashings
    if not confirm(f"Remove {len(keys)} objects of namespace {namespace!r} from the pool?"):
        raise CommandError("nothing was removed")
    counts: Counter[Status] = Counter()
    with session.store() as store:
        for start in range(0, len(keys), KEYS_PER_CALL):
            counts.update(store.remove(keys[start : start + KEYS_PER_CALL], force=force))
            session.tell("removing", min(start + KEYS_PER_CALL, len(keys)), len(keys))
    removed, gone = counts.pop(Status.OK, 0), counts.pop(Status.MISS, 0)
    lines = [f"{removed} objects removed, {gone} were gone already"]
    if counts[Status.LEASED]:
        lines.append(
            f"{counts[Status.LEASED]} are being read and were left; call again after the lease "
            "(default_kv_lease_ttl), or with --force"
        )
    others = {status: count for status, count in counts.items() if status is not Status.LEASED}
    lines += [f"{count} could not be removed: {status.value}" for status, count in others.items()]
    exit_ = Exit.ERROR if any(others.values()) else Exit.LOOK if counts[Status.LEASED] else Exit.WELL
    data = {"removed": removed, "gone": gone, **{status.value: count for status, count in counts.items() if count}}
    return Answer(data, (), lines, exit_)
