"""Lookups through a local socket, for schedulers that cannot have a store client of their own.

With protocol `ascend` a client takes an NPU, which the scheduler's process has not; the first worker answers instead.
A message is MessagePack: a list of keys one way, a list of statuses the other. Keys after the word `mark`, which is no
key, are stored as markers instead of looked up.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvpool_connector.answers import statuses_of
from kvpool_connector.contract.status import Status, num_outages
from kvpool_connector.contract.store import Store
from kvpool_connector.local_socket import LocalServer, receive, send, socket_directory
from kvpool_connector.lookup import write_markers
from kvpool_connector.outage import Outage

logger = logging.getLogger(__name__)

MAX_KEYS = 1 << 20
"""Short strings take far more memory than bytes on the wire, so they are counted before they are read."""
MARK = "mark"


def socket_path(engine_id: str, port: int, data_parallel_rank: int) -> Path:
    """Where the engine's first worker answers. Raises `PermissionError`, see `socket_directory`."""
    # The path of a socket may have 107 bytes, and an engine's id any length.
    engine = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
    return socket_directory() / f"lookup-{engine}-{port}-{data_parallel_rank}"


class LookupServer(LocalServer):
    """Answers lookups at a path until it is closed."""

    def __init__(self, store: Store, path: Path) -> None:
        """Begin to answer. `store` stays the caller's."""
        super().__init__(path, partial(_answer, store), "kvpool-lookup-server")


def _answer(store: Store, message: bytes) -> bytes | None:
    try:
        keys = _texts(message)
    except (ValueError, msgspec.MsgspecError) as error:
        logger.warning("event=lookup_refused error=%s", error)
        return None
    marks = keys[:1] == [MARK]
    statuses = statuses_of(partial(write_markers, store), keys[1:]) if marks else statuses_of(store.exist, keys)
    return msgspec.msgpack.encode([status.value for status in statuses])


class SocketLookup:
    """A `kvpool_connector.lookup.Lookup` that asks a `LookupServer`."""

    def __init__(self, path: Path, outage: Outage, timeout_s: float) -> None:
        """Nothing is opened before the first question, as the worker may start later."""
        self._path = path
        self._outage = outage
        self._timeout_s = timeout_s
        self._connection: socket.socket | None = None

    def exist(self, keys: Sequence[str]) -> list[Status]:
        """See `kvpool_connector.lookup.Lookup`."""
        return self._within_limit([], keys) if keys else []

    def mark(self, key: str) -> Status:
        """See `kvpool_connector.lookup.Lookup`."""
        return self._within_limit([MARK], [key])[0]

    def _within_limit(self, verb: Sequence[str], keys: Sequence[str]) -> list[Status]:
        if self._outage.active:
            return [Status.UNAVAILABLE] * len(keys)
        try:
            statuses = self._ask(verb, keys)
        except TimeoutError:
            statuses = [Status.TIMEOUT] * len(keys)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            logger.info("event=lookup_failed path=%s error=%s", self._path, error)
            statuses = [Status.UNAVAILABLE] * len(keys)
        if num_outages(statuses):
            # A late answer must not be taken for the next question's.
            self.close()
        self._outage.note(statuses)
        return statuses

    def _ask(self, verb: Sequence[str], keys: Sequence[str]) -> list[Status]:
        deadline = time.monotonic() + self._timeout_s
        if self._connection is None:
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._connection.settimeout(self._timeout_s)
            self._connection.connect(str(self._path))
        send(self._connection, msgspec.msgpack.encode([*verb, *keys]), deadline)
        answer = receive(self._connection, deadline)
        values = _texts(answer or b"")
        if len(values) != len(keys):
            raise ValueError(f"{len(values)} answers to {len(keys)} keys")
        return [Status(value) for value in values]

    def close(self) -> None:
        """See `kvpool_connector.lookup.Lookup`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _texts(message: bytes) -> list[str]:
    """The message's texts. Raises `ValueError` for too many, `msgspec.MsgspecError` for anything else."""
    # MessagePack's arrays of 16 and 32 bits of length; shorter ones are short.
    width = {0xDC: 2, 0xDD: 4}.get(message[0], 0) if message else 0
    count = int.from_bytes(message[1 : 1 + width], "big")
    if count > MAX_KEYS:
        raise ValueError(f"{count} texts in one message; at most {MAX_KEYS}")
    return msgspec.msgpack.decode(message, type=list[str])
