"""Who asks for what: prompts that share beginnings, chats that go on, adapters, salts, images, embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from kvpool_simulator.engine.prefix import VOCABULARY, Extras
from kvpool_simulator.engine.request import Wish

IMAGE_TOKEN = VOCABULARY
"""Stands where an image is; which one, its hash says."""


@dataclass(frozen=True)
class Mix:
    """What users do, as shares of requests."""

    num_documents: int = 4
    document_tokens: int = 200
    longest_question: int = 40
    longest_answer: int = 12
    adapters: float = 0.0
    salts: float = 0.0
    images: float = 0.0
    embeds: float = 0.0
    pooling: float = 0.0
    aborts: float = 0.0
    chats: float = 0.3


class Users:
    """Wishes in the order in which they come."""

    def __init__(self, random: Random, mix: Mix, engine: str = "") -> None:
        self._random = random
        self._mix = mix
        self._engine = engine
        documents = Random(0)
        # The same documents for every engine and run: that is what a pool is for.
        self._documents = [
            [documents.randrange(VOCABULARY) for _ in range(mix.document_tokens)] for _ in range(mix.num_documents)
        ]
        self._last: list[tuple[tuple[int, ...], Extras]] = []

    def wishes(self, count: int) -> Iterator[Wish]:
        """`count` wishes."""
        for number in range(count):
            yield self._wish(f"{self._engine}{number}")

    def _wish(self, request_id: str) -> Wish:
        random, mix = self._random, self._mix
        question = [random.randrange(VOCABULARY) for _ in range(random.randint(1, mix.longest_question))]
        if self._last and random.random() < mix.chats:
            prompt, extras = random.choice(self._last)
            tokens = [*prompt, *question]
        else:
            document = random.choice(self._documents)
            length = random.choice([len(document), random.randint(0, len(document)), len(document) // 16 * 16])
            tokens = [*document[:length], *(question if random.random() < 0.9 or not length else [])]
            extras = self._extras(length)
            for position, _ in extras.images:
                tokens[position] = IMAGE_TOKEN
        if len(tokens) > 2 * mix.document_tokens:
            tokens = tokens[: 2 * mix.document_tokens]
        embeds = random.random() < mix.embeds
        if embeds:
            extras = Extras(extras.lora, extras.salt, extras.images, nonce=request_id)
        else:
            self._last = [*self._last[-7:], (tuple(tokens), extras)]
        max_tokens = random.randint(1, mix.longest_answer)
        return Wish(
            request_id,
            tuple(tokens),
            max_tokens,
            random.randint(1, max_tokens) if random.random() < 0.5 else None,
            extras,
            embeds,
            pooling=not embeds and random.random() < mix.pooling,
        )

    def _extras(self, length: int) -> Extras:
        random, mix = self._random, self._mix
        # The same two names for adapters and salts: an adapter X and a salt X are not one thing.
        lora = random.choice(("X", "Y")) if random.random() < mix.adapters else ""
        salt = random.choice(("X", "Y")) if random.random() < mix.salts else ""
        images: tuple[tuple[int, str], ...] = ()
        if length and random.random() < mix.images:
            images = ((random.randrange(length), random.choice(("cat", "dog"))),)
        return Extras(lora, salt, images)
