"""Whether this engine names blocks as the others of its namespace do: otherwise it stores and never hits.

A block's key is made from the engine's hash of its tokens and all before them. The pool keeps, for a namespace, how
these hashes are made, with the hash of a sample block to compare.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from kvpool_connector.contract.keys import Key
from kvpool_connector.contract.store import Store

logger = logging.getLogger(__name__)

SECRET = "(not shown)"


@dataclass(frozen=True)
class Hashing:
    """How an engine names blocks."""

    algorithm: str
    """vLLM's `--prefix-caching-hash-algo`."""
    seed: str | None
    """`PYTHONHASHSEED`; None where it is not set."""
    sample: str
    """Hash of the sample block, in hexadecimal; empty where every process starts from random bytes."""

    def to_json(self) -> str:
        """For the pool. The seed is kept back where collisions could be made by who knows it."""
        seed = SECRET if self.seed is not None and self.algorithm.startswith("xxhash") else self.seed
        return json.dumps({"algorithm": self.algorithm, "seed": seed, "sample": self.sample}, sort_keys=True)

    @classmethod
    def from_json(cls, text: bytes) -> Hashing | None:
        """The inverse; None for what is not one."""
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        texts = (found.algorithm, found.sample) if found.seed is None else (found.algorithm, found.sample, found.seed)
        return found if all(isinstance(text, str) for text in texts) else None

    @property
    def seed_in_words(self) -> str:
        """As one would set it."""
        return "PYTHONHASHSEED not set" if self.seed is None else f"PYTHONHASHSEED={self.seed[:40]}"

    def __str__(self) -> str:
        return f"{self.algorithm[:40]} with {self.seed_in_words}"


def hashing_key(namespace: str, epoch: int) -> str:
    """Where the pool keeps how the block hashes of a namespace are made."""
    return str(Key(namespace, epoch, name="hashing"))


def read_hashing(store: Store, namespace: str, epoch: int) -> Hashing | None:
    """How the pool's block hashes are made; None where nobody has said it, or it cannot be read."""
    status, text = store.read(hashing_key(namespace, epoch))
    return Hashing.from_json(text) if status.ok else None


def check_hashing(own: Hashing, store: Store, namespace: str, epoch: int) -> bool:
    """Compare with the hashes of those who store in the namespace, or say it for those who come later.

    False, and an error in the log, when no block of theirs can be hit.
    """
    if not own.sample:
        logger.error(
            "event=random_hashes algorithm=%s: PYTHONHASHSEED is not set, so that every process makes block hashes of "
            "its own: no block is ever found by another engine. Start every engine on every node with PYTHONHASHSEED=0 "
            "(any one value)",
            own.algorithm,
        )
        return False
    # Whoever comes first says it: a write never replaces, so that of two who start at once one finds the other's.
    store.write(hashing_key(namespace, epoch), own.to_json().encode(), pinned=True)
    found = read_hashing(store, namespace, epoch)
    if found is None or found.sample == own.sample:
        return True
    if (found.algorithm, found.seed) == (own.algorithm, own.seed):
        remedy = "Run the same versions of vLLM and Python on every node"
    else:
        seed = "without PYTHONHASHSEED" if found.seed is None else f"with {found.seed_in_words}"
        remedy = f"Start this engine {seed} and with --prefix-caching-hash-algo {found.algorithm[:40]}"
    logger.error(
        "event=other_hashes namespace=%r: the pool's block hashes are made by %s, this engine's by %s: neither finds "
        "the other's blocks. %s; or, if those are old, remove them (`kvpool clear --namespace %s`) and start again",
        namespace,
        found,
        own,
        remedy,
        namespace,
    )
    return False
