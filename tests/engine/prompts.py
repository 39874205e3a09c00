"""What the engines are asked, and how much of it a pool can give."""

from __future__ import annotations

from random import Random

VOCABULARY = 250
PROMPTS = [[(i * 7 + j * j) % VOCABULARY for j in range(length)] for i, length in enumerate((200, 320, 33, 20, 129))]
"""Lengths around block boundaries: full blocks and a rest, exactly full blocks, one more, less than one block."""


def unseen(name: str) -> list[list[int]]:
    """Prompts of the same lengths that no other name gives: engines that name no namespace share one pool."""
    random = Random(name)
    return [[random.randrange(VOCABULARY) for _ in prompt] for prompt in PROMPTS]


def poolable(block_size: int) -> list[int]:
    """Tokens of each of `PROMPTS` that a full pool gives: whole blocks, with a token left to compute."""
    return [(len(prompt) - 1) // block_size * block_size for prompt in PROMPTS]
