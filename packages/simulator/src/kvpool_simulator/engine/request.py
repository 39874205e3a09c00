"""A request, with the names that vLLM's has where connectors read it (vLLM 0.32: `v1/request.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

from kvpool_simulator.engine.prefix import Extras, Prefix, extend_block_hashes


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7

    @property
    def finished(self) -> bool:
        """True once the request has ended, however."""
        return self.value >= RequestStatus.FINISHED_STOPPED.value


@dataclass(frozen=True)
class Wish:
    """What a user asks for."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_after: int | None = None
    """Output tokens after which the model says that it is done; nobody knows before."""
    extras: Extras = field(default_factory=Extras)
    embeds: bool = False
    pooling: bool = False


class Request:
    """A request under way. The model decides its tokens, so they can be known before they are verified."""

    def __init__(self, wish: Wish, hash_block_size: int) -> None:
        self.wish = wish
        self.request_id = wish.request_id
        self.status = RequestStatus.WAITING
        self.num_prompt_tokens = len(wish.prompt)
        self.num_tokens = len(wish.prompt)
        """Tokens of the prompt and of the verified output."""
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_placeholders = 0
        """Tokens that steps in flight will have sampled."""
        self.num_rejected_in_flight = 0
        """Guessed tokens that steps in flight will turn out to have computed in vain."""
        self.draft: list[int] = []
        self.num_preemptions = 0
        self.generation = 0
        """Raised when what is in flight for the request is void."""
        self.block_hashes: list[bytes] = []
        self.lora_request = SimpleNamespace(lora_name=wish.extras.lora) if wish.extras.lora else None
        self.trace_headers: dict[str, str] | None = None
        self.cache_salt = wish.extras.salt or None
        self.prompt_embeds = object() if wish.embeds else None
        self.pooling_params = object() if wish.pooling else None
        self.isolation = repr((wish.extras.lora, wish.extras.salt, wish.extras.nonce))
        self.truth = Prefix(wish.extras, hash_block_size, list(wish.prompt))
        self.all_token_ids = self.truth.tokens
        extend_block_hashes(self.block_hashes, self.truth, self.num_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Verified tokens after the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_wanted(self) -> int:
        """Output tokens after which the request ends."""
        return min(self.wish.max_tokens, self.wish.stop_after or self.wish.max_tokens)

    def key_at(self, position: int) -> int:
        """The number of the true prefix that ends at `position`, verified or not."""
        while len(self.truth.keys) <= position:
            self.truth.extend([self.truth.next_token])
        return self.truth.keys[position]

    def token_at(self, position: int) -> int:
        """The true token at `position`."""
        self.key_at(position)
        return self.truth.tokens[position]

    def verify(self, count: int) -> None:
        """The model's next `count` tokens are known now."""
        self.num_tokens += count
        self.key_at(self.num_tokens - 1)
        extend_block_hashes(self.block_hashes, self.truth, self.num_tokens)
