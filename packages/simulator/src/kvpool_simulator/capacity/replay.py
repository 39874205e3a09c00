"""A trace against a fleet of engines that share one pool."""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpool_connector.contract.descriptor import Descriptor, LayerContent, ModelIdentity
from kvpool_connector.contract.shards import Shard
from kvpool_connector.contract.topology import ContextRange, HeadRange
from kvpool_simulator.capacity.pool import SizedPool
from kvpool_simulator.capacity.trace import TOKENS_PER_ID, Request
from kvpool_simulator.device.models import Gqa, model

ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Fleet:
    """What serves the trace."""

    model: str
    pool_bytes: int
    instances: int = 1
    local_bytes: int = 0
    """KV memory of one instance, kept as a prefix cache."""
    prefill_tokens_per_s: float = 20_000.0
    """Of one instance: a block is in the pool, for others, once it has been computed."""
    lease_s: float = 10.0


@dataclass
class Outcome:
    """What came of a replay. Tokens are of prompts."""

    fleet: Fleet
    num_requests: int = 0
    prompt_tokens: int = 0
    local_tokens: int = 0
    """Hit in the instance's own cache."""
    pool_tokens: int = 0
    """Hit in the pool, beyond the own cache: prefill saved by the pool."""
    loaded_bytes: int = 0
    saved_bytes: int = 0
    evicted: int = 0
    refused: int = 0

    @property
    def hit_rate(self) -> float:
        """Tokens hit anywhere, of all."""
        return (self.local_tokens + self.pool_tokens) / max(self.prompt_tokens, 1)

    @property
    def pool_rate(self) -> float:
        """Tokens that the pool alone saved, of all."""
        return self.pool_tokens / max(self.prompt_tokens, 1)

    @property
    def saved_prefill_s(self) -> float:
        """Seconds of one instance's computing that the pool saved."""
        return self.pool_tokens / self.fleet.prefill_tokens_per_s


def bytes_per_token(name: str) -> int:
    """KV of one token in all layers and heads, in bf16. Raises `ValueError` for an unknown model."""
    found = model(name)
    shape = found.attention
    if isinstance(shape, Gqa):
        width = shape.num_kv_heads * (shape.head_dim + (shape.v_head_dim or shape.head_dim))
        return found.num_layers * width * ELEMENT_BYTES
    indexed = found.num_layers if found.indexer_layers is None else len(found.indexer_layers)
    elements = found.num_layers * (shape.kv_lora_rank + shape.rope_dim) + indexed * shape.index_head_dim
    return elements * ELEMENT_BYTES


class Keys:
    """Real keys of a trace's blocks, each made once."""

    def __init__(self, name: str) -> None:
        content = Descriptor(
            ModelIdentity(name), 0, TOKENS_PER_ID, HeadRange(0, 1, 1), ContextRange(0, 1, 1), (LayerContent("0", ()),)
        )
        self._shard = Shard("capacity", 0, content.fingerprint)
        self._keys: dict[int, str] = {}

    def of(self, ids: Iterable[int]) -> list[str]:
        """One key an id."""
        kept = self._keys
        return [kept.get(i) or kept.setdefault(i, self._make(i)) for i in ids]

    def _make(self, hash_id: int) -> str:
        return self._shard.key(hashlib.sha256(hash_id.to_bytes(8, "big")).digest())


class _LocalCache:
    """An instance's own prefix cache: least recently used blocks go first."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._blocks: OrderedDict[str, None] = OrderedDict()

    def prefix(self, keys: Sequence[str]) -> int:
        """Blocks of the front that are there."""
        for count, key in enumerate(keys):
            if key not in self._blocks:
                return count
        return len(keys)

    def keep(self, keys: Sequence[str]) -> None:
        """The blocks of a prompt; its end is forgotten first."""
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._room:
            self._blocks.popitem(last=False)


def replay(requests: Sequence[Request], fleet: Fleet, keys: Keys | None = None) -> Outcome:
    """Serve the requests, instance by instance in turn. A saved block is there for others once it is computed."""
    keys = keys or Keys(fleet.model)
    block_bytes = bytes_per_token(fleet.model) * TOKENS_PER_ID
    pool = SizedPool(fleet.pool_bytes, block_bytes, fleet.lease_s)
    caches = [_LocalCache(fleet.local_bytes // block_bytes) for _ in range(fleet.instances)]
    free_at = [0.0] * fleet.instances
    outcome = Outcome(fleet)
    saves: list[tuple[float, int, list[str]]] = []

    def store(until: float) -> None:
        while saves and saves[0][0] <= until:
            when, _, computed = heapq.heappop(saves)
            outcome.saved_bytes += block_bytes * sum(pool.put(key, when) for key in computed)

    for number, request in enumerate(requests):
        now, instance = request.timestamp / 1000, number % fleet.instances
        store(now)
        blocks = keys.of(request.full_ids)
        # One token is always computed.
        usable = blocks[: max(0, (request.input_length - 1) // TOKENS_PER_ID)]
        local = caches[instance].prefix(usable)
        hit = local
        while hit < len(usable) and pool.exist(usable[hit], now):
            hit += 1
        caches[instance].keep(blocks)
        num_computed = request.input_length - hit * TOKENS_PER_ID
        free_at[instance] = max(free_at[instance], now) + num_computed / fleet.prefill_tokens_per_s
        if blocks[hit:]:
            heapq.heappush(saves, (free_at[instance], number, blocks[hit:]))
        outcome.num_requests += 1
        outcome.prompt_tokens += request.input_length
        outcome.local_tokens += local * TOKENS_PER_ID
        outcome.pool_tokens += (hit - local) * TOKENS_PER_ID
        outcome.loaded_bytes += (hit - local) * block_bytes
    store(float("inf"))
    outcome.evicted, outcome.refused = pool.num_evicted, pool.num_refused
    return outcome
