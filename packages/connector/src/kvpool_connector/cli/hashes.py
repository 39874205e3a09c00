"""Block hashes of a prompt, as vLLM makes them: the last part of a key.

From vLLM 0.32.0 (`v1/core/kv_cache_utils.py`, `utils/hashing.py`): a block's hash is
`H((parent_hash, tuple(token_ids), extra_keys))`, the first parent is `H(seed)`, and the seed is `PYTHONHASHSEED` where
it is set. Without it, versions up to 0.23 take random bytes, so that no two processes agree.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from kvpool_connector.cli.output import CommandError

ALGORITHMS = ("sha256", "sha256_cbor")


def block_hashes(
    token_ids: Sequence[int], block_size: int, seed: str, algorithm: str = "sha256", salt: str = ""
) -> list[bytes]:
    """One hash a full block of `block_size` tokens. `salt` is the request's cache salt.

    Raises `CommandError` for an algorithm that is not known or whose library is not there.
    """
    digest = _digest(algorithm)
    parent = digest(seed)
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        extra = (("cache_salt", salt),) if salt and start == 0 else None
        parent = digest((parent, tuple(token_ids[start : start + block_size]), extra))
        hashes.append(parent)
    return hashes


def _digest(algorithm: str) -> Callable[[Any], bytes]:
    if algorithm == "sha256":
        return lambda value: hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
    if algorithm == "sha256_cbor":
        try:
            cbor = importlib.import_module("cbor2")
        except ImportError as error:
            raise CommandError("--hash-algorithm sha256_cbor needs the library cbor2: pip install cbor2") from error
        return lambda value: hashlib.sha256(cbor.dumps(value, canonical=True)).digest()
    raise CommandError(f"--hash-algorithm {algorithm!r} is not known; expected one of {', '.join(ALGORITHMS)}")
