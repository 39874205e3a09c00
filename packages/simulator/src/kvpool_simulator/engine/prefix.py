"""What a token stands for: a number that follows from it and all before it, and the engine's hashes of blocks.

The number decides the token's KV bytes (`kvpool_simulator.engine.oracle`) and, in this engine's model, the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256

VOCABULARY = 50_000


@dataclass(frozen=True)
class Extras:
    """What beside its tokens decides a request's KV, or must keep it apart."""

    lora: str = ""
    salt: str = ""
    images: tuple[tuple[int, str], ...] = ()
    """`(position, hash)` of multimodal inputs, by position of their first token."""
    nonce: str = ""
    """Set where the tokens say nothing of the content (prompt embeddings): such a request is like no other."""

    def seed(self) -> bytes:
        """Stands before the first token. Typed: an adapter X and a salt X are two things."""
        return repr((self.lora, self.salt, self.nonce)).encode()

    def at(self, position: int) -> bytes:
        """What a token at `position` carries beside itself."""
        return repr([name for start, name in self.images if start == position]).encode()


def follow(before: bytes, token: int, beside: bytes = b"") -> bytes:
    """The 8 bytes that stand for a prefix that goes on with `token`."""
    return blake2b(token.to_bytes(4, "little") + beside, digest_size=8, key=before).digest()


@dataclass
class Prefix:
    """A request's tokens with what each stands for; grows at the end."""

    extras: Extras
    hash_block_size: int
    tokens: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    """By position: the number of the prefix that ends there."""
    _last: bytes = b""

    def __post_init__(self) -> None:
        self._last = blake2b(self.extras.seed(), digest_size=8).digest()
        self._images = {start for start, _ in self.extras.images}
        tokens, self.tokens = self.tokens, []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            position = len(self.tokens)
            beside = self.extras.at(position) if position in self._images else b""
            self._last = follow(self._last, token, beside)
            self.tokens.append(token)
            self.keys.append(int.from_bytes(self._last, "little"))

    @property
    def next_token(self) -> int:
        """What the model says after these tokens."""
        return self.keys[-1] % VOCABULARY


def guessed(key: int, tokens: Sequence[int]) -> list[int]:
    """The numbers of a prefix's continuation that may be wrong."""
    last, keys = key.to_bytes(8, "little"), []
    for token in tokens:
        last = follow(last, token)
        keys.append(int.from_bytes(last, "little"))
    return keys


def extend_block_hashes(hashes: list[bytes], prefix: Prefix, num_tokens: int) -> None:
    """Append the hashes of blocks that the first `num_tokens` tokens complete, as vLLM chains them.

    Adapter and images are in every block that they touch, the salt in the first. As in vLLM (0.32,
    `v1/core/kv_cache_utils.py`) they are plain names one after the other, so an adapter X and a salt X collide; what
    keeps them apart is the connector's to do.
    """
    size = prefix.hash_block_size
    extras = prefix.extras
    while (len(hashes) + 1) * size <= num_tokens:
        start = len(hashes) * size
        names = [extras.lora] if extras.lora else []
        names += [name for position, name in extras.images if start <= position < start + size]
        if not hashes:
            names += [name for name in (extras.salt, extras.nonce) if name]
        parent = hashes[-1] if hashes else b"kvpool"
        tokens = prefix.tokens[start : start + size]
        hashes.append(sha256(repr((parent, tokens, tuple(names))).encode()).digest())
