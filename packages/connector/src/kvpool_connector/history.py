"""What the scheduler side decided about the last requests, and why: for whoever asks `kvpool explain --request-id`.

Kept in memory, bounded, and told through a local socket: no line a request in a log, no call to the store.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from pathlib import Path

import msgspec

from kvpool_connector.local_socket import LocalServer, receive, send, socket_directory

logger = logging.getLogger(__name__)

PREFIX = "requests-"
ASK_LIMIT_S = 2.0
MOST_MATCHES = 20


class Decision(msgspec.Struct):
    """The last lookup of a request and what became of it. Counts are tokens."""

    request_id: str
    time_s: float
    """Of the lookup; seconds since the epoch."""
    result: str
    """`hit`, `miss`, `unanswered` (the store was down or late), `short` (no block left to ask for) or `below` (less
    than `min_tokens_to_load`)."""
    num_tokens: int
    engine_tokens: int
    """In the engine's own prefix cache."""
    most_tokens: int
    """Up to the last block that could be hit."""
    hit_tokens: int
    """In the engine's cache or in the pool, as far as the pool was asked."""
    least_tokens: int = 0
    """Of the pool's, to be loaded: `min_tokens_to_load`, given or learnt."""
    group: int = 0
    block: int = 0
    """With `missing_keys`: the first block that was needed and not there."""
    missing_keys: tuple[str, ...] = ()
    block_keys: int = 0
    """Keys of that block, there or not."""
    loaded_tokens: int = 0
    load_failed: bool = False


class History:
    """The decisions about the last `limit` requests."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._lock = threading.Lock()

    def looked_up(self, decision: Decision) -> None:
        """A request was looked up, for the first time or again."""
        with self._lock:
            self._decisions[decision.request_id] = decision
            self._decisions.move_to_end(decision.request_id)
            if len(self._decisions) > self._limit:
                self._decisions.popitem(last=False)

    def loading(self, request_id: str, num_tokens: int) -> None:
        """The engine took up `num_tokens` of the hit."""
        with self._lock:
            if decision := self._decisions.get(request_id):
                decision.loaded_tokens = num_tokens

    def load_failed(self, request_id: str) -> None:
        """What was taken up did not come, and was computed."""
        with self._lock:
            if decision := self._decisions.get(request_id):
                decision.load_failed = True

    def find(self, request_id: str) -> list[Decision]:
        """The request's, and those whose ids begin with it: engines make longer ids of what users see."""
        with self._lock:
            found = [decision for known, decision in self._decisions.items() if known.startswith(request_id)]
        return found[-MOST_MATCHES:]


def serve_history(history: History) -> LocalServer | None:
    """Answer questions about `history` on this machine; None, in words, where that cannot be."""

    def answer(message: bytes) -> bytes:
        return msgspec.msgpack.encode(history.find(message.decode(errors="replace")))

    try:
        directory = socket_directory()
        for path in directory.glob(f"{PREFIX}*"):
            _remove_dead(path)
        return LocalServer(directory / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}", answer, "kvpool-history")
    except OSError as error:
        logger.warning("event=no_history error=%s: `kvpool explain --request-id` will not find this engine", error)
        return None


def _remove_dead(path: Path) -> None:
    """What an engine that was killed has left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ASK_LIMIT_S)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return


def ask_engines(request_id: str) -> tuple[int, list[Decision]]:
    """How many of this user's engines on this machine answered, and what they know of the request.

    Raises `PermissionError`, see `socket_directory`.
    """
    num_engines, found = 0, list[Decision]()
    for path in sorted(socket_directory().glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError, msgspec.MsgspecError), socket.socket(socket.AF_UNIX) as connection:
            deadline = time.monotonic() + ASK_LIMIT_S
            connection.settimeout(ASK_LIMIT_S)
            connection.connect(str(path))
            send(connection, request_id.encode(), deadline)
            found += msgspec.msgpack.decode(receive(connection, deadline) or b"", type=list[Decision])
            num_engines += 1
    return num_engines, found
