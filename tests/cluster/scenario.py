"""From one integer to a cluster: sizes, ranks, layouts, users and faults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from kvpool_simulator.device import MODELS
from kvpool_simulator.engine import Limits, Mix, Order, Timing

PROFILES = ("lite", "swarm", "soak")
HYBRID = "tiny-hybrid"
"""A model made here: full attention and a sliding window, two groups."""
STATES = "tiny-states"
"""A model made here: full attention, and two groups of layers whose blocks hold states."""
MADE_HERE = (HYBRID, STATES)


@dataclass(frozen=True)
class Shape:
    """Model and ranks of every engine."""

    model: str = "tiny-deepseek-v3.2"
    tp: int = 1
    pp: int = 1
    pcp: int = 1
    dcp: int = 1
    interleave: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """Of `kvpool_simulator.device.rank_spec`."""
    block_sizes: tuple[int, ...] = (16,)
    """By group."""
    window: int | None = None
    stages: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None: as even as they go."""
    cuts: tuple[int, ...] = ()
    """Layers of each part that objects are cut into; empty: as the stages are."""


@dataclass(frozen=True)
class Scenario:
    """Everything that one run is made of."""

    seed: int
    profile: str
    shape: Shape = field(default_factory=Shape)
    limits: Limits = field(default_factory=lambda: Limits(64))
    num_engines: int = 1
    consumer: Shape | None = None
    """Of the last engine, which then only loads, while the others only save."""
    num_requests: int = 30
    mix: Mix = field(default_factory=Mix)
    timing: Timing = field(default_factory=Timing)
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the connector."""
    arrival_s: float = 0.01
    latency_s: float = 0.001
    rates: dict[str, float] = field(default_factory=dict)
    """Faults by site."""
    lease_ms: int = 10_000
    spare_objects: int | None = None
    """Room in the store beside what a ballast takes; None for plenty."""
    events: tuple[str, ...] = ()
    """What happens to the store in the course of the run."""

    def __str__(self) -> str:
        shape, limits = self.shape, self.limits
        ranks = " ".join(
            f"{name}{size}"
            for name, size in (("tp", shape.tp), ("pp", shape.pp), ("pcp", shape.pcp), ("dcp", shape.dcp))
            if size > 1
        )
        how = [
            "async" if limits.asynchronous else "",
            f"spec{limits.num_draft_tokens}" if limits.num_draft_tokens else "",
        ]
        how += [name for name, on in self.settings.items() if on is True]
        faults = [*self.rates, *self.events]
        return (
            f"{self.profile} seed {self.seed}: {self.num_engines}x {shape.model} {ranks or 'one rank'} "
            f"vLLM {limits.order.value} {' '.join(filter(None, how))} {self.settings.get('transfer', 'auto')} "
            f"blocks {limits.num_blocks} requests {self.num_requests} faults [{' '.join(faults)}]"
        )


STORE_SITES = ("code", "short_list", "none", "raise", "short_read", "late", "never", "evict", "lie")
EVENTS = ("kill", "hang", "restart", "owner")


def scenario(seed: int, profile: str) -> Scenario:
    """The scenario of a seed."""
    random = Random(f"{profile}/{seed}")
    if profile == "lite":
        return _lite(seed, random)
    if profile == "swarm":
        return _swarm(seed, random)
    if profile == "soak":
        return _soak(seed, random)
    raise ValueError(f"profile {profile!r} is unknown; expected one of {PROFILES}")


def _lite(seed: int, random: Random) -> Scenario:
    """No faults."""
    return Scenario(seed, "lite", limits=Limits(random.choice((34, 40, 64))), num_engines=2, num_requests=60)


def _shape(random: Random) -> Shape:
    kind = random.choice(("sparse", "sparse", "mla", "gqa", "gqa", "hybrid"))
    if kind == "hybrid":
        sizes = random.choice(((16, 16), (16, 32), (32, 16)))
        return Shape(HYBRID, tp=random.choice((1, 2)), block_sizes=sizes, window=random.choice((17, 24, 33, 64)))
    if kind == "gqa":
        model, heads = random.choice((("tiny-qwen3-32b", 2), ("tiny-qwen3-235b", 4)))
        tp = random.choice((1, 2, 4, 8))
        dcp = random.choice([d for d in (1, 2) if max(1, tp // heads) % d == 0])
        options: dict[str, Any] = {}
    else:
        model = random.choice(("tiny-deepseek-v3.2", "tiny-glm-5.2") if kind == "sparse" else ("tiny-deepseek-v3",))
        tp = random.choice((1, 2, 4))
        dcp = random.choice([d for d in (1, 2, 4) if tp % d == 0])
        options = {"mtp": random.random() < 0.5}
        if kind == "sparse":
            options["sparse"] = random.choice(("split", "bundled"))
            if random.random() < 0.3:
                options |= {"sparse": "split", "c8": True}
    pcp = random.choice((1, 1, 1, 2))
    interleave = random.choice((1, 4, 16)) if pcp * dcp > 1 else 1
    return Shape(model, tp, random.choice((1, 1, 2)), pcp, dcp, interleave, options)


def _with_states(shape: Shape, random: Random) -> Shape:
    """In place of one shape in ten a model with states."""
    if random.random() >= 0.1:
        return shape
    return Shape(STATES, tp=random.choice((1, 2, 4)), block_sizes=(random.choice((16, 32)),) * 3)


def _with_cuts(shape: Shape, random: Random) -> Shape:
    """In one run in five, objects cut along the layers: each by itself, or, on one stage, anywhere."""
    if shape.model in MADE_HERE or random.random() >= 0.2:
        return shape
    count = MODELS[shape.model].num_layers
    first = random.randrange(1, count)
    return replace(shape, cuts=(first, count - first) if shape.pp == 1 else (1,) * count)


def _swarm(seed: int, random: Random) -> Scenario:
    """Anything that users, sizes and stores may do at once."""
    shape = _with_cuts(_with_states(_shape(random), Random(f"states/{seed}")), Random(f"cuts/{seed}"))
    order = random.choice(tuple(Order))
    several = len(shape.block_sizes) > 1
    if several:
        # Older engines cannot be told of failed loads there, so the connector does not load.
        order = Order.V0_32
    transfer = random.choice(("packed", "packed", "direct"))
    longest = max(shape.block_sizes) * shape.pcp * shape.dcp
    mix = Mix(
        num_documents=random.choice((2, 4, 8)),
        document_tokens=random.choice((3, 6, 12)) * longest,
        longest_question=random.choice((8, 40, 100)),
        longest_answer=random.choice((4, 12, 40)),
        adapters=random.choice((0.0, 0.3)),
        salts=random.choice((0.0, 0.3)),
        images=random.choice((0.0, 0.3)),
        embeds=random.choice((0.0, 0.1)),
        pooling=random.choice((0.0, 0.1)),
        aborts=random.choice((0.0, 0.1, 0.4)),
        chats=random.choice((0.0, 0.5)),
    )
    # The longest request must fit, or it could never end.
    needed = sum(-(-(2 * mix.document_tokens + 60) // (size * shape.pcp * shape.dcp)) + 2 for size in shape.block_sizes)
    limits = Limits(
        num_blocks=needed + random.choice((2, 2, 8, 30)),
        max_batched_tokens=random.choice((32, 64, 256, 2048)),
        max_requests=random.choice((2, 8, 32)),
        max_chunk=random.choice((None, None, 24, 100)),
        num_draft_tokens=random.choice((0, 0, 1, 3)) * (shape.model != STATES),
        asynchronous=random.random() < 0.5,
        caching=random.random() < 0.85,
        order=order,
    )
    weather = random.choice(("calm", "rare", "rare", "stormy"))
    share = {"calm": 0.0, "rare": 0.3, "stormy": 0.25}[weather]
    sites = [site for site in STORE_SITES if random.random() < share]
    if transfer == "direct" and "never" in sites:
        # A direct load's memory is the transport's until it returns: then somebody must wait.
        sites.remove("never")
    choices = (0.002, 0.01, 0.03) if weather == "rare" else (0.02, 0.1, 0.3)
    rates = {site: random.choice(choices) for site in sites}
    for site in ("device_late", "slow"):
        if random.random() < share / 2:
            rates[site] = random.choice(choices)
    settings: dict[str, Any] = {
        "transfer": transfer,
        "load_async": random.random() < 0.5,
        "save_decode_cache": random.random() < 0.5,
        "max_queued_blocks": random.choice((16, 200, 16384, 16384)),
        "load_timeout_s": random.choice((0.05, 1.0, 20.0)),
        "lookup_timeout_s": random.choice((0.05, 1.0)),
        "outage_pause_s": random.choice((0.01, 0.1, 5.0)),
        "fence_timeout_s": random.choice((0.0, 0.005, 0.05)),
        **_by_layers(Random(f"layers/{seed}")),
        **(_checked(Random(f"checked/{seed}")) if transfer == "packed" else {}),
    }
    unchecked = settings.get("integrity") == "off" and not settings["audit_every"]
    if unchecked and "never" not in sites and Random(f"learnt/{seed}").random() < 0.3:
        settings["transfer"] = "learnt"
    if shape.model.startswith("tiny-qwen") and Random(f"heads/{seed}").random() < 0.3:
        settings["kv_head_split"] = "head"
    made = Scenario(
        seed,
        "swarm",
        shape,
        limits,
        num_engines=random.choice((1, 1, 2)),
        num_requests=random.choice((20, 40, 80)),
        mix=mix,
        timing=Timing(layer_s=random.choice((0.0, 0.0005, 0.01))),
        settings=settings,
        arrival_s=random.choice((0.0, 0.01, 0.1)),
        latency_s=random.choice((0.0, 0.001, 0.005, 0.05)),
        rates=rates,
        lease_ms=random.choice((1, 200, 10_000, 10_000)),
        spare_objects=random.choice((None, None, None, 50, 500)),
        events=tuple(event for event in EVENTS if random.random() < share / 3),
    )
    resets = Random(f"resets/{seed}")
    if made.num_engines == 1 and resets.random() < 0.3:
        # Of several engines with new weights the first to be reset would share with the last that is not.
        return replace(made, events=(*made.events, *["reset"] * resets.choice((1, 3))))
    return made


def _by_layers(random: Random) -> dict[str, Any]:
    """Half of the seeds move layer by layer."""
    if random.random() < 0.5:
        return {}
    return {
        "use_layerwise": True,
        "layerwise_prefetch_layers": random.choice((None, 1, 2)),
        "layerwise_layers_per_transfer": random.choice((None, 1, 1, 2)),
        "layerwise_session_limit_s": random.choice((0.01, 1.0, 20.0)),
        "layerwise_renew_s": random.choice((0.02, 0.1, 2.0)),
    }


def _checked(random: Random) -> dict[str, Any]:
    """Checksums and audits, which need packed transfer, in half of the seeds each."""
    return {"integrity": random.choice(("off", "off", "sampled", "on")), "audit_every": random.choice((0, 0, 1, 5))}


def _soak(seed: int, random: Random) -> Scenario:
    """Sixteen ranks of tiny V3.2, blocks recycled all the time, many loads."""
    return Scenario(
        seed,
        "soak",
        Shape("tiny-deepseek-v3.2", tp=16, options={"mtp": True}),
        Limits(num_blocks=120, max_batched_tokens=1024, max_requests=64, asynchronous=bool(seed % 2)),
        num_engines=1,
        num_requests=700,
        mix=Mix(num_documents=12, document_tokens=20 * 16, longest_question=20, longest_answer=3, chats=0.2),
        settings={"transfer": "packed", "load_async": bool(seed // 2 % 2)},
        arrival_s=0.0,
        latency_s=0.0005,
    )
