"""An OpenTelemetry collector on loopback that keeps the spans it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Spans in the order of their arrival."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}/v1/traces"
        self._spans: list[Span] = []

    def take(self, body: bytes) -> None:
        """An export, as it comes over HTTP."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self._spans += scope.spans

    def named(self, name: str, count: int, trace: str = "", limit_s: float = 30) -> list[Span]:
        """The spans of a name (of one trace), once there are at least `count`: exporters send them seconds later."""
        deadline = time.monotonic() + limit_s
        while len(found := [s for s in self._spans if s.name == name and trace in ("", s.trace_id.hex())]) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} spans {name!r} came within {limit_s:g} s"
            time.sleep(0.1)
        return found


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Nothing: the test's output is for the test."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield found
        server.shutdown()
        thread.join()
