"""Real Mooncake over TCP on loopback: a master, and a process that owns the memory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvpool_connector.config import StoreSettings
from kvpool_connector.mooncake import MooncakeStore, import_mooncake
from tests.targets.target import Target

LEASE_S = 2.0
START_LIMIT_S = 60.0

OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"setup returned {code}", flush=True)
sys.stdin.read()
store.close()
"""


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RealMaster:
    """A `mooncake_master` process and one that gives it memory; both can be killed, stopped and started again."""

    def __init__(self, segment_bytes: int, lease_s: float = LEASE_S, flags: Mapping[str, object] | None = None) -> None:
        """`flags`: further flags of `mooncake_master`, by name."""
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        metrics_port = free_port()
        self.endpoint = f"127.0.0.1:{metrics_port}"
        self._flags = [
            *("--rpc_address", "127.0.0.1", "--rpc_port", str(self.port)),
            *("--metrics_host", "127.0.0.1", "--metrics_port", str(metrics_port)),
            *("--default_kv_lease_ttl", str(int(lease_s * 1000))),
            *(word for name, value in (flags or {}).items() for word in (f"--{name}", str(value))),
        ]
        self._segment_bytes = segment_bytes
        self.process: subprocess.Popen[str] | None = None
        self.owner: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the master; returns when it answers. Raises `RuntimeError` when it does not within the limit."""
        program = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if program is None:
            raise RuntimeError("mooncake_master is not installed: pip install mooncake-transfer-engine-non-cuda")
        self.process = subprocess.Popen(
            [program, *self._flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
        )
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"mooncake_master did not answer at {self.address} within {START_LIMIT_S:g} s")

    def start_owner(self, script: str = OWNER) -> None:
        """Start the process that owns the memory, so that objects outlive whoever stores them."""
        self.owner = subprocess.Popen(
            [sys.executable, "-c", script, self.address, str(self._segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.owner.stdout is not None
        answer = self.owner.stdout.readline().strip()
        if answer != "ready":
            raise RuntimeError(f"the owner of the memory did not start: {answer or 'it ended'}")

    def kill(self) -> None:
        """End the master at once, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """Let the master hang."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a hanging master go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End both processes."""
        for process in (self.owner, self.process):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(10)
            if process is not None:
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        pipe.close()


@contextmanager
def real_master(segment_bytes: int = 1 << 30, lease_s: float = LEASE_S) -> Iterator[RealMaster]:
    """A master with memory."""
    master = RealMaster(segment_bytes, lease_s)
    try:
        master.start()
        master.start_owner()
        yield master
    finally:
        master.close()


def make_store(address: str, segment_bytes: int) -> MooncakeStore:
    """A connected client of a real master, from any process."""
    settings = StoreSettings(
        master_server_address=address, protocol="tcp", global_segment_size=segment_bytes, local_buffer_size=16 << 20
    )
    store = MooncakeStore(settings)
    store.connect()
    return store


class MooncakeTarget(Target):
    """Time passes by itself, and another client than the connector's looks at objects with other calls."""

    def __init__(self, address: str) -> None:
        super().__init__("mooncake", address, make_store, LEASE_S)
        self._observer = import_mooncake().MooncakeDistributedStore()
        code = self._observer.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address)
        if code:
            raise RuntimeError(f"the observer of the objects could not be set up: {code}")

    def peek(self, key: str) -> bytes | None:
        return self._observer.get(key) or None

    def poke(self, key: str, offset: int, value: bytes) -> None:
        old = self._observer.get(key)
        for code in (
            self._observer.remove(key, True),
            self._observer.put(key, old[:offset] + value + old[offset + len(value) :]),
        ):
            assert code == 0, f"changing {key!r} round the connector returned {code}"

    def close(self) -> None:
        super().close()
        self._observer.close()

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


@contextmanager
def mooncake(segment_bytes: int = 2 << 30) -> Iterator[MooncakeTarget]:
    """Real Mooncake with memory."""
    with real_master(segment_bytes) as master:
        target = MooncakeTarget(master.address)
        try:
            yield target
        finally:
            target.close()
