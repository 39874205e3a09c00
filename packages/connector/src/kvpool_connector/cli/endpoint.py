"""The master's HTTP endpoints: what is in the pool, without a lease and without a client.

Measured on Mooncake 0.3.13.post1: `/get_all_keys` lists readable keys, one a line, and grants no lease;
`/batch_query_keys` grants none either (`/query_key` does), and decodes percent signs once;
`/metrics` is Prometheus text.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvpool_connector.cli.output import CommandError
from kvpool_connector.cli.progress import Tell, silent

DEFAULT_PORT = 9003
NO_TENANTS = 409
"""Status of the question about tenants on a master that was started without them."""
KEYS_PER_QUERY = 64
MAX_ANSWER_BYTES = 2 << 30
"""Some 20 million keys; nothing longer is read from the wire."""
_SAMPLE = re.compile(r'^(\w+)(?:\{segment="([^"]*)"\})? ([-+0-9.eE]+)$', re.MULTILINE)


@dataclass(frozen=True)
class Segment:
    """Memory that a client gave to the pool."""

    name: str
    endpoint: str
    num_bytes: int
    used_bytes: int
    protocol: str
    status: str


class MasterEndpoint:
    """The HTTP side of one `mooncake_master`."""

    def __init__(self, host: str, port: int, timeout_s: float = 10.0, tell: Tell = silent) -> None:
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._tell = tell

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self._host}:{self._port}"

    def keys(self) -> list[str]:
        """All readable keys. Raises `CommandError` where the master does not answer."""
        return self._get("/get_all_keys").decode("utf-8", "replace").splitlines()

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Bytes of each object that is there. Keys that the endpoint cannot name (with commas) are left out."""
        sizes: dict[str, int] = {}
        askable = [key for key in keys if "," not in key]
        for start in range(0, len(askable), KEYS_PER_QUERY):
            part = askable[start : start + KEYS_PER_QUERY]
            self._tell("asking for sizes", start, len(askable))
            answer = self._json("/batch_query_keys?keys=" + ",".join(quote(key, safe="") for key in part))
            for key, found in answer.get("data", {}).items():
                if found.get("ok") and found.get("values"):
                    sizes[key] = int(found["values"][0]["size_"])
        return sizes

    def segments(self) -> list[Segment]:
        """The mounted memory."""
        return [
            Segment(
                found["segment_name"],
                found.get("te_endpoint", ""),
                int(found["size_bytes"]),
                int(found.get("allocator_used_bytes", 0)),
                found.get("protocol", ""),
                found.get("status", ""),
            )
            for found in self._json("/get_segments_detail").get("segments", [])
        ]

    def metrics(self) -> dict[str, float]:
        """The master's counters and gauges without labels, by name."""
        text = self._get("/metrics").decode("utf-8", "replace")
        return {name: value for name, label, value in _samples(text) if not label}

    def tenants(self) -> list[str] | None:
        """Tenants that may store; None where the master keeps none apart, whatever its clients say."""
        found = self._json("/api/v1/tenant_quotas", NO_TENANTS)
        return [row["tenant_id"] for row in found["data"]] if found.get("success") else None

    def _json(self, path: str, *also: int) -> dict[str, Any]:
        body = self._get(path, *also)
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise self._foreign(path, error) from error
        if not isinstance(answer, dict):
            raise self._foreign(path, "not a JSON object")
        return answer

    def _get(self, path: str, *also: int) -> bytes:
        """The body of an answer with status 200, or one of `also`."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(
                f"the master's HTTP endpoint does not answer at {self.address} ({error or type(error).__name__}). It "
                "is where --metrics_host and --metrics_port of mooncake_master say (port 9003 by default): start the "
                "master, or name the endpoint with --endpoint host:port"
            ) from error
        finally:
            connection.close()
        if response.status not in (200, *also):
            raise self._foreign(path, f"status {response.status}")
        return body

    def _foreign(self, path: str, found: object) -> CommandError:
        name = path.split("?", maxsplit=1)[0]
        return CommandError(
            f"{self.address}{name} does not answer as mooncake_master 0.3.13 does ({found}); is this the master's "
            "metrics port?"
        )


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for name, label, value in _SAMPLE.findall(text):
        yield name, label, float(value)
