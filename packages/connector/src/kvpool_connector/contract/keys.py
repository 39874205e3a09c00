"""The grammar of keys: one printer, one parser, each the other's inverse.

    object     = "kvpool1/" namespace "/" epoch "/" fingerprint "/" block_hash [ "+" tag ]
    descriptor = "kvpool1/" namespace "/" epoch "/" fingerprint "/descriptor"
    marker     = "kvpool1/" namespace "/" epoch "/reset"
    hashing    = "kvpool1/" namespace "/" epoch "/hashing"

`namespace` is a user's name with every byte outside `A-Z a-z 0-9 _ . - ~` percent-encoded; `epoch` a decimal number
of at most 18 digits that a reset raises (a marker says that its epoch has begun, `hashing` how its block hashes are
made); `fingerprint` 32 hexadecimal digits (`kvpool_connector.contract.descriptor`);
`block_hash` the engine's hash of the block and all before it, in hexadecimal; `tag` 16 hexadecimal digits that keep
adapters and salts apart, absent when there are none.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, tee
from urllib.parse import quote, unquote

from kvpool_connector.contract.errors import KeyFormatError

PREFIX = "kvpool1"
MAX_CHARS = 8192
"""Of a text that is taken for a key: the longest namespace, percent-encoded, has some 1,500."""
_KEY = re.compile(
    rf"{PREFIX}/(?P<namespace>[A-Za-z0-9_.~%-]+)/(?P<epoch>0|[1-9][0-9]{{0,17}})/"
    r"(?:(?P<name>reset|hashing)|(?P<fingerprint>[0-9a-f]{32})/(?:descriptor|(?P<block_hash>(?:[0-9a-f]{2})+)(?:\+(?P<tag>[0-9a-f]{16}))?))",
    re.ASCII,
)


@dataclass(frozen=True)
class Key:
    """A parsed key. `block_hash` is empty for a descriptor's key, `fingerprint` too for an object of the namespace."""

    namespace: str
    epoch: int
    fingerprint: str = ""
    block_hash: bytes = b""
    tag: str = ""
    name: str = ""
    """Of an object of the namespace itself, without a fingerprint: `reset`, the marker of an epoch, or `hashing`."""

    def __str__(self) -> str:
        if not self.fingerprint:
            return f"{PREFIX}/{quote(self.namespace, safe='')}/{self.epoch}/{self.name}"
        scope = scope_of(self.namespace, self.epoch, self.fingerprint)
        return object_keys([scope], [self.block_hash], self.tag)[0] if self.block_hash else f"{scope}/descriptor"


@lru_cache(256)
def scope_of(namespace: str, epoch: int, fingerprint: str) -> str:
    """What all keys of one shard begin with."""
    return f"{PREFIX}/{quote(namespace, safe='')}/{epoch}/{fingerprint}"


def object_keys(scopes: Sequence[str], block_hashes: Iterable[bytes], tag: str) -> list[str]:
    """The keys of blocks' objects under one or more scopes, block by block.

    Requests have a thousand and more of them: nothing slow in here.
    """
    texts = map(bytes.hex, block_hashes)
    if len(scopes) == 1:
        keys: Iterable[str] = map(f"{scopes[0]}/".__add__, texts)
    else:
        # A hash is printed once for all scopes, and keys are made in the order in which the store reads them.
        by_scope = zip(scopes, tee(texts, len(scopes)), strict=True)
        keys = chain.from_iterable(zip(*(map(f"{scope}/".__add__, its) for scope, its in by_scope), strict=True))
    return [f"{key}+{tag}" for key in keys] if tag else list(keys)


def parse_key(text: str) -> Key:
    """The inverse of `str(key)`.

    Raises `KeyFormatError` for any text that `str` of a `Key` would not print, or that is longer than `MAX_CHARS`.
    """
    match = _KEY.fullmatch(text) if len(text) <= MAX_CHARS else None
    if match is None:
        raise KeyFormatError(f"{text[:200]!r} is not a key: expected {PREFIX}/namespace/epoch/fingerprint/block_hash")
    try:
        namespace = unquote(match["namespace"], errors="strict")
    except UnicodeDecodeError as error:
        raise KeyFormatError(f"{text[:200]!r}: the namespace is not percent-encoded UTF-8") from error
    key = Key(
        namespace,
        int(match["epoch"]),
        match["fingerprint"] or "",
        bytes.fromhex(match["block_hash"] or ""),
        match["tag"] or "",
        match["name"] or "",
    )
    if str(key) != text:
        raise KeyFormatError(f"{text[:200]!r} is not in canonical form; expected {str(key)[:200]!r}")
    return key


def tag_of(lora: str | None = None, salt: str | None = None) -> str:
    """The key's tag for a request: empty without adapter and salt.

    Each part is typed, so that an adapter named X and a salt X never meet, whatever the engine's own hash does.
    """
    parts = [[kind, value] for kind, value in (("lora", lora), ("salt", salt)) if value]
    if not parts:
        return ""
    return hashlib.blake2b(json.dumps(parts).encode("ascii"), digest_size=8).hexdigest()
