"""What the engines are asked, and how much of it a pool can give."""

from __future__ import annotations

PROMPTS = [[(i * 7 + j * j) % 250 for j in range(length)] for i, length in enumerate((200, 320, 33, 20, 129))]
"""Lengths around block boundaries: full blocks and a rest, exactly full blocks, one more, less than one block."""

OTHERS = [[token + 1 for token in prompt] for prompt in PROMPTS]
"""Prompts of the same lengths that share nothing with `PROMPTS`."""


def poolable(block_size: int) -> list[int]:
    """Tokens of each of `PROMPTS` that a full pool gives: whole blocks, with a token left to compute."""
    return [(len(prompt) - 1) // block_size * block_size for prompt in PROMPTS]
