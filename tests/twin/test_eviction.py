"""What goes when space is short, and what stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.twin.world import Memory, World

claim = pytest.mark.claim
MIB = 1 << 20
GAP_S = 0.02
"""Between puts, so that each has a time of its own; two rounds of eviction."""


def fill(world: World, client: Any, names: Sequence[str], config: Any = None) -> list[int]:
    """Put one MiB under each name; the codes."""
    memory, codes = Memory(MIB), []
    for name in names:
        codes.append(client.put_from(name, memory.address, MIB, *([config] if config else [])))
        world.advance(GAP_S)
    return codes


def named(count: int, stem: str = "k") -> list[str]:
    return [f"{stem}{i:02}" for i in range(count)]


def gone(world: World, names: Sequence[str]) -> list[str]:
    """Those that are not readable once eviction has come to rest."""
    world.advance(0.2)
    return [name for name in names if name not in world.readable_keys()]


@claim("evict-trigger", "eviction starts when more than 0.90 of the space is used: at the 58th MiB of 64, 4 objects go")
def test_evict_trigger(fresh_world: World) -> None:
    client = fresh_world.client(64 * MIB)
    assert fill(fresh_world, client, named(57)) == [0] * 57
    assert gone(fresh_world, named(57)) == []
    assert fill(fresh_world, client, ["x"]) == [0]
    assert gone(fresh_world, named(57)) == named(4)


@claim("evict-amount", "one round evicts the share used - watermark + ratio of all objects: of a batch of 64 MiB, 10")
def test_evict_amount(fresh_world: World) -> None:
    client, memory, keys = fresh_world.client(64 * MIB), Memory(MIB), named(64)
    assert client.batch_put_from(keys, [memory.address] * 64, [MIB] * 64) == [0] * 64
    # Objects of one batch go in their order.
    assert gone(fresh_world, keys) == keys[:10]


@claim("evict-flags", "watermark 0.5 and ratio 0.25: of 33 MiB of 64, 9 objects go")
def test_evict_flags(make_world: Callable[..., World]) -> None:
    # A round may run while the last put has its space and has not ended: it then counts one object less.
    # 0.266 of 33 and of 32 objects are both 9 (rounded up), so that the moment does not matter.
    world = make_world(eviction_high_watermark_ratio=0.5, eviction_ratio=0.25)
    client = world.client(64 * MIB)
    fill(world, client, named(32))
    assert gone(world, named(32)) == []
    fill(world, client, ["x"])
    assert gone(world, named(32)) == named(9)


@claim("evict-ratio-zero", "with ratio 0, one object goes at a time, until the watermark is respected")
def test_evict_ratio_zero(make_world: Callable[..., World]) -> None:
    world = make_world(eviction_ratio=0.0)
    fill(world, world.client(64 * MIB), named(60))
    assert gone(world, named(60)) == named(3)


@claim("evict-lru", "the object whose last lease, or put, is oldest goes first: queries refresh, a second put does not")
def test_evict_lru(fresh_world: World) -> None:
    client = fresh_world.client(64 * MIB)
    fill(fresh_world, client, named(50))
    assert client.is_exist("k00") == 1
    assert client.get_size("k02") == MIB
    assert fill(fresh_world, client, ["k01"]) == [0]
    fresh_world.advance(1.2)
    fill(fresh_world, client, named(8, "y"))
    assert gone(fresh_world, named(50)) == ["k01", "k03", "k04", "k05"]
    assert gone(fresh_world, named(8, "y")) == []


@claim("evict-lease", "a leased object is passed over; the next oldest goes")
def test_evict_lease(fresh_world: World) -> None:
    client = fresh_world.client(64 * MIB)
    fill(fresh_world, client, named(50))
    assert client.is_exist("k00") == 1
    fill(fresh_world, client, named(8, "y"))
    assert gone(fresh_world, named(50)) == named(5)[1:]


@claim("soft-pin", "soft-pinned objects stay while there are others")
def test_soft_pin(fresh_world: World) -> None:
    client, config = fresh_world.client(64 * MIB), fresh_world.config()
    config.soft_pin_action = fresh_world.module.SoftPinAction.ENABLE
    fill(fresh_world, client, named(20), config)
    fill(fresh_world, client, named(38, "y"))
    assert gone(fresh_world, named(20)) == []
    assert gone(fresh_world, named(38, "y")) == named(4, "y")


@claim("soft-pin-all", "when all are soft-pinned, the oldest of them go, half as many: 2 of 58")
def test_soft_pin_all(fresh_world: World) -> None:
    client, config = fresh_world.client(64 * MIB), fresh_world.config()
    config.soft_pin_action = fresh_world.module.SoftPinAction.ENABLE
    fill(fresh_world, client, named(58), config)
    assert gone(fresh_world, named(58)) == named(2)


@claim("soft-pin-ttl", "a soft pin ends after its time, counted from the put; a query does not renew it")
def test_soft_pin_ttl(fresh_world: World) -> None:
    client, config = fresh_world.client(64 * MIB), fresh_world.config(soft_pin_action=pin(fresh_world))
    config.soft_pin_ttl_ms = 2500
    fill(fresh_world, client, named(20), config)
    fresh_world.advance(1.0)
    for name in named(20):
        assert client.is_exist(name) == 1
        fresh_world.advance(GAP_S)
    fresh_world.advance(1.8)
    fill(fresh_world, client, named(38, "y"))
    assert gone(fresh_world, named(20)) == named(4)
    assert gone(fresh_world, named(38, "y")) == []


def pin(world: World) -> Any:
    return world.module.SoftPinAction.ENABLE


@claim("soft-pin-disable", "an upsert with DISABLE takes the soft pin away; a second put with ENABLE changes nothing")
def test_soft_pin_disable(fresh_world: World) -> None:
    client, config = fresh_world.client(64 * MIB), fresh_world.config(soft_pin_action=pin(fresh_world))
    memory, off = Memory(MIB), fresh_world.config(soft_pin_action=fresh_world.module.SoftPinAction.DISABLE)
    fill(fresh_world, client, named(20), config)
    assert client.batch_upsert_from(named(20), [memory.address] * 20, [MIB] * 20, off) == [0] * 20
    fill(fresh_world, client, named(20), config)
    fresh_world.advance(GAP_S)
    fill(fresh_world, client, named(38, "y"))
    assert gone(fresh_world, named(20)) == named(4)


@claim("hard-pin-counts", "hard-pinned objects do not go and do not count for the amount")
def test_hard_pin_counts(fresh_world: World) -> None:
    client = fresh_world.client(64 * MIB)
    fill(fresh_world, client, named(20), fresh_world.config(with_hard_pin=True))
    fill(fresh_world, client, named(38, "y"))
    assert gone(fresh_world, named(20)) == []
    assert gone(fresh_world, named(38, "y")) == named(3, "y")


@claim("pins-and-remove", "pins do not protect against remove")
def test_pins_and_remove(fresh_world: World) -> None:
    client = fresh_world.client(16 * MIB)
    fill(fresh_world, client, ["hard"], fresh_world.config(with_hard_pin=True))
    fill(fresh_world, client, ["soft"], fresh_world.config(soft_pin_action=pin(fresh_world)))
    assert client.batch_remove(["hard", "soft"]) == [0, 0]


@claim("open-sessions-count", "unfinished writes count as used and do not go")
def test_open_sessions_count(fresh_world: World) -> None:
    client = fresh_world.client(64 * MIB)
    fill(fresh_world, client, named(40))
    assert client.batch_put_session_start(named(18, "s"), [MIB] * 18) == [0] * 18
    assert gone(fresh_world, named(40)) == named(3)
    assert client.batch_put_session_end(named(18, "s")) == [0] * 18


@claim("full-at-once", "a put that finds no space fails at once with -200 and makes the next round evict something")
def test_full_at_once(make_world: Callable[..., World]) -> None:
    world = make_world(eviction_high_watermark_ratio=1.0)
    client = world.client(16 * MIB)
    assert fill(world, client, named(17)) == [0] * 16 + [-200]
    assert gone(world, named(16)) == ["k00"]
    assert fill(world, client, ["k16"]) == [0]


@claim("full-leased", "with every object leased, the wish for space outlives the leases")
def test_full_leased(make_world: Callable[..., World]) -> None:
    world = make_world(eviction_high_watermark_ratio=1.0)
    client = world.client(16 * MIB)
    fill(world, client, named(16))
    for name in named(16):
        assert client.is_exist(name) == 1
    assert fill(world, client, ["x"]) == [-200]
    assert gone(world, named(16)) == []
    world.advance(1.2)
    assert len(gone(world, named(16))) == 1
    assert fill(world, client, ["x"]) == [0]


@claim("fragmented", "space in holes that are too small does not help: -200, though enough bytes are free")
def test_fragmented(make_world: Callable[..., World]) -> None:
    world = make_world(eviction_high_watermark_ratio=1.0)
    client, memory = world.client(16 * MIB), Memory(2 * MIB)
    fill(world, client, named(16))
    assert client.batch_remove(["k01", "k03"]) == [0, 0]
    assert client.put_from("x", memory.address, 2 * MIB) == -200
    assert gone(world, named(16)) == ["k00", "k01", "k03"]
    assert client.put_from("x", memory.address, 2 * MIB) == 0
