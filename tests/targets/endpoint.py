"""The HTTP endpoints of a simulated master, as far as the command line asks them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

from kvpool_simulator.store import SimulatedMaster


@contextmanager
def endpoint_of(master: SimulatedMaster, capacity: int) -> Iterator[str]:
    """`host:port` where keys, sizes, segments and metrics are told, without leases. `capacity`: bytes of memory."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(master, self.path, capacity)
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


def answer(master: SimulatedMaster, path: str, capacity: int) -> tuple[int, bytes]:
    """Status and body, in the forms that were seen of mooncake_master 0.3.13.post1."""
    name, _, query = path.partition("?")
    keys: list[str] = master.service.master.keys()
    if name == "/get_all_keys":
        return 200, ("\n".join(keys) + "\n").encode()
    if name == "/batch_query_keys":
        # Decoded once, and cut afterwards: a comma cannot be named.
        asked = unquote(query.removeprefix("keys=")).split(",")
        return 200, json.dumps({"success": True, "data": {key: _found(master, key) for key in asked}}).encode()
    if name == "/get_segments_detail":
        segment = {
            "segment_name": "simulated",
            "te_endpoint": "127.0.0.1:0",
            "size_bytes": capacity,
            "allocator_used_bytes": sum(len(master.peek(key) or b"") for key in keys),
            "protocol": "tcp",
            "status": "OK",
        }
        return 200, json.dumps({"segments": [segment]}).encode()
    if name == "/metrics":
        counts = {"master_evicted_key_count": 0, "master_active_clients": 1}
        return 200, "".join(f"# TYPE {k} counter\n{k} {v}\n" for k, v in counts.items()).encode()
    if name == "/api/v1/tenant_quotas":
        return 409, b'{"success":false,"error_code":-1011,"error_message":"UNAVAILABLE_IN_CURRENT_MODE"}'
    return 404, b"{}"


def _found(master: SimulatedMaster, key: str) -> dict[str, object]:
    value = master.peek(key)
    if value is None:
        return {"ok": False, "error": "OBJECT_NOT_FOUND", "values": None}
    return {"ok": True, "error": None, "values": [{"size_": len(value)}]}
