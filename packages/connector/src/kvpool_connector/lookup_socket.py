"""Lookups through a local socket, for schedulers that cannot have a store client of their own.

With protocol `ascend` a client takes an NPU, which the scheduler's process has not; the first worker answers instead.
A message is four bytes of length (big endian) and MessagePack: a list of keys one way, a list of statuses the other.
Keys after the word `mark`, which is no key, are stored as markers instead of looked up.
The socket lies in a directory that only its owner may enter.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvpool_connector.answers import statuses_of
from kvpool_connector.contract.status import Status
from kvpool_connector.contract.store import Store
from kvpool_connector.lookup import write_markers
from kvpool_connector.outage import Outage

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""About 300,000 keys; nothing longer is read from the wire."""
MAX_KEYS = 1 << 20
"""Short strings take far more memory than bytes on the wire, so they are counted before they are read."""
MARK = "mark"
IDLE_LIMIT_S = 600.0
"""A connection that says nothing for so long is closed; the client opens another."""


def socket_path(engine_id: str, port: int, data_parallel_rank: int) -> Path:
    """Where the engine's first worker answers.

    Raises `PermissionError` when the directory is somebody else's or open to others.
    """
    directory = Path(tempfile.gettempdir()) / f"kvpool-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{directory} belongs to user {found.st_uid} with mode {found.st_mode & 0o777:o}; expected user "
            f"{os.getuid()} and mode 700. Remove it, or set TMPDIR to a directory of your own"
        )
    # The path of a socket may have 107 bytes, and an engine's id any length.
    engine = hashlib.blake2b(engine_id.encode(), digest_size=8).hexdigest()
    return directory / f"lookup-{engine}-{port}-{data_parallel_rank}"


class LookupServer:
    """Answers lookups at a path until it is closed."""

    def __init__(self, store: Store, path: Path) -> None:
        """Begin to answer. `store` stays the caller's."""
        self._path = path
        path.unlink(missing_ok=True)

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                _serve(self.request, store)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(str(path), Handler)
        path.chmod(0o600)
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvpool-lookup-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


def _serve(connection: socket.socket, store: Store) -> None:
    """One client's questions, until it leaves or breaks the form."""
    connection.settimeout(IDLE_LIMIT_S)
    with contextlib.suppress(OSError):
        while (message := _receive(connection)) is not None:
            try:
                keys = _texts(message)
            except (ValueError, msgspec.MsgspecError) as error:
                logger.warning("event=lookup_refused error=%s", error)
                return
            marks = keys[:1] == [MARK]
            statuses = statuses_of(partial(write_markers, store), keys[1:]) if marks else statuses_of(store.exist, keys)
            _send(connection, msgspec.msgpack.encode([status.value for status in statuses]))


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
        if any(status.outage for status in statuses):
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
        _send(self._connection, msgspec.msgpack.encode([*verb, *keys]), deadline)
        answer = _receive(self._connection, deadline)
        values = _texts(answer or b"")
        if len(values) != len(keys):
            raise ValueError(f"{len(values)} answers to {len(keys)} keys")
        return [Status(value) for value in values]

    def close(self) -> None:
        """See `kvpool_connector.lookup.Lookup`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _send(connection: socket.socket, message: bytes, deadline: float | None = None) -> None:
    _limit(connection, deadline)
    connection.sendall(len(message).to_bytes(4, "big") + message)


def _receive(connection: socket.socket, deadline: float | None = None) -> bytes | None:
    """One message; None when the other side has left or the message is too long."""
    head = _read(connection, 4, deadline)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    if size > MAX_MESSAGE_BYTES:
        logger.warning("event=lookup_refused bytes=%d limit=%d", size, MAX_MESSAGE_BYTES)
        return None
    return _read(connection, size, deadline)


def _texts(message: bytes) -> list[str]:
    """The message's texts. Raises `ValueError` for too many, `msgspec.MsgspecError` for anything else."""
    # MessagePack's arrays of 16 and 32 bits of length; shorter ones are short.
    width = {0xDC: 2, 0xDD: 4}.get(message[0], 0) if message else 0
    count = int.from_bytes(message[1 : 1 + width], "big")
    if count > MAX_KEYS:
        raise ValueError(f"{count} texts in one message; at most {MAX_KEYS}")
    return msgspec.msgpack.decode(message, type=list[str])


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        _limit(connection, deadline)
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _limit(connection: socket.socket, deadline: float | None) -> None:
    """A slow trickle must not stretch the limit."""
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the lookup's time is up")
        connection.settimeout(left)
