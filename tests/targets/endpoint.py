"""The HTTP endpoints of a simulated master, as far as the command line asks them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from kvpool_simulator.store import SimulatedMaster
from kvpool_simulator.store.master import Master


@contextmanager
def endpoint_of(master: SimulatedMaster) -> Iterator[str]:
    """`host:port` where the master's keys, sizes, segments and metrics are told, without leases."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(master.service.master, self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def answer(master: Master, path: str) -> tuple[int, bytes]:
    """Status and body, in the forms that were seen of mooncake_master 0.3.13.post1."""
    name, _, query = path.partition("?")
    if name == "/get_all_keys":
        return 200, ("\n".join(master.keys()) + "\n").encode()
    if name == "/batch_query_keys":
        return 200, json.dumps({"success": True, "data": {key: _found(master, key) for key in _keys(query)}}).encode()
    if name == "/get_segments_detail":
        segments = {
            "segment_name": "simulated",
            "te_endpoint": "127.0.0.1:0",
            "size_bytes": master.capacity_bytes,
            "allocator_used_bytes": master.used_bytes,
            "protocol": "tcp",
            "status": "OK",
        }
        return 200, json.dumps({"segments": [segments] if master.capacity_bytes else []}).encode()
    if name == "/metrics":
        counts = {"master_evicted_key_count": master.evicted, "master_active_clients": 1}
        return 200, "".join(f"# TYPE {k} counter\n{k} {v}\n" for k, v in counts.items()).encode()
    return 404, b"{}"


def _keys(query: str) -> list[str]:
    # Decoded once, and cut afterwards: a comma cannot be named.
    return unquote(query.removeprefix("keys=")).split(",")


def _found(master: Master, key: str) -> dict[str, object]:
    size = master.peek(key).num_bytes
    if not size:
        return {"ok": False, "error": "OBJECT_NOT_FOUND", "values": None}
    return {"ok": True, "error": None, "values": [{"size_": size}]}
