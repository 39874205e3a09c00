"""Messages between processes of one user on one machine: a socket that only its owner may open.

A message is four bytes of length (big endian) and that many bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
"""About 300,000 keys; nothing longer is read from the wire."""
IDLE_LIMIT_S = 600.0
"""A connection that says nothing for so long is closed; the client opens another."""


def socket_directory() -> Path:
    """Where the sockets of this user lie.

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
    return directory


class LocalServer:
    """Answers messages at a path until it is closed."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes | None], name: str) -> None:
        """Begin to answer, in threads of its own. None as an answer closes the connection. `name`: of the thread."""
        self._path = path
        # Under its name only once it listens: one that refuses is taken for what a killed process has left.
        unnamed = path.with_name(f"new-{secrets.token_hex(8)}")

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                _serve(self.request, answer)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

        self._server = Server(str(unnamed), Handler)
        unnamed.chmod(0o600)
        unnamed.rename(path)
        self._thread = threading.Thread(target=self._server.serve_forever, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._path.unlink(missing_ok=True)


def _serve(connection: socket.socket, answer: Callable[[bytes], bytes | None]) -> None:
    """One client's messages, until it leaves or breaks the form."""
    connection.settimeout(IDLE_LIMIT_S)
    with contextlib.suppress(OSError):
        while (message := receive(connection)) is not None:
            answered = answer(message)
            if answered is None:
                return
            send(connection, answered)


def send(connection: socket.socket, message: bytes, deadline: float | None = None) -> None:
    """Send one message. `deadline`: by the monotonic clock; past it `TimeoutError` is raised."""
    _limit(connection, deadline)
    connection.sendall(len(message).to_bytes(4, "big") + message)


def receive(connection: socket.socket, deadline: float | None = None) -> bytes | None:
    """One message; None when the other side has left or the message is too long."""
    head = _read(connection, 4, deadline)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    if size > MAX_MESSAGE_BYTES:
        logger.warning("event=message_refused bytes=%d limit=%d", size, MAX_MESSAGE_BYTES)
        return None
    return _read(connection, size, deadline)


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
            raise TimeoutError("the time for this message is up")
        connection.settimeout(left)
