"""One request's state between steps, on the scheduler side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool_connector.tracing import Headers


@dataclass(frozen=True)
class GroupRule:
    """What the scheduler side must know of a KV cache group."""

    block_size: int
    """Tokens of one logical block: the rank's block size times the context-parallel size."""
    window: int | None = None
    """Tokens before a boundary that computing on from there reads: None for all (full attention), the sliding window
    less one, or one for a state that stands for all before it."""
    state: bool = False
    """A block holds a state, overwritten token by token: right only when a step ends where the block does."""
    prompts_only: bool = False
    """A step with guesses leaves the state elsewhere, so only those of the prompt are where the table says."""

    def first_needed(self, boundary: int) -> int:
        """Index of the first block that must be present to go on computing at token `boundary`."""
        if self.window is None:
            return 0
        return max(0, boundary - self.window) // self.block_size

    def first_certain(self, start: int, end: int) -> int:
        """Index of the first block that surely holds its content after a step from token `start` to `end`."""
        if self.state:
            return end // self.block_size + (-1 if end % self.block_size == 0 else 1)
        # Blocks before a window may have been given away: only this step's are certain.
        return 0 if self.window is None else start // self.block_size


@dataclass(frozen=True)
class RequestView:
    """A request as the engine's scheduler sees it now."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    """The engine's live list: one hash every `hash_block_size` tokens, of verified tokens only."""
    tag: str = ""
    poolable: bool = True
    """False for requests whose content the hashes do not stand for (prompt embeddings, pooling)."""
    trace_headers: Headers = ()
    token_ids: Sequence[int] = ()
    """The engine's live list, prompt and answer."""
    lora_name: str | None = None


@dataclass
class RequestTracker:
    """What is remembered of a request between its first allocation and its end."""

    view: RequestView
    block_ids: list[list[int | None]]
    """By group, by block index; None where the engine holds no block (outside a window)."""
    num_computed_tokens: int = 0
    num_saved: list[int] = field(default_factory=list)
    """By group: blocks of the front that have been handed to a save, loaded, or given up."""
    due_at: float = 0
    """Computed tokens below which nothing new is to be saved, so that a step need not look."""
    epoch: int = 0
    """The pool's when the request last began from nothing: what it computes belongs to that epoch."""
    num_loading: int = 0
    """Tokens of its last load, until that is known to have failed."""
    load_failed: bool = False
    """A load of this request failed: no further load, so that a lying store cannot hold it for ever."""

    def append_blocks(self, block_ids: Sequence[Sequence[int | None]]) -> None:
        """The engine gave the request more blocks."""
        for table, new in zip(self.block_ids, block_ids, strict=True):
            table.extend(new)

    def replace_blocks(self, block_ids: Sequence[Sequence[int | None]]) -> None:
        """The request starts over with other blocks (first schedule, or resumed after preemption)."""
        self.block_ids = [list(table) for table in block_ids]
        self.begin_saving_anew()

    def begin_saving_anew(self) -> None:
        """All blocks are to be looked at again."""
        self.num_saved = [0] * len(self.block_ids)
        self.due_at = 0
