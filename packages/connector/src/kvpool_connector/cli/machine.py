"""What `doctor` asks of this machine alone: versions, memory, limits, sockets."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvpool_connector.cli.finding import Finding, error, skipped, warning, well
from kvpool_connector.cli.output import in_bytes
from kvpool_connector.config import PoolSettings, StoreSettings
from kvpool_connector.lookup_socket import socket_path
from kvpool_connector.mooncake import memory_to_lock

DISTRIBUTIONS = (
    "kvpool-connector",
    "vllm",
    "vllm-ascend",
    "torch",
    "torch-npu",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine",
)
"""Looked for by name; what is not there is not named."""


def versions() -> Finding:
    """What is installed."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return well("versions", ", ".join([f"Python {platform.python_version()}", *found]))


def hash_seed(environ: Mapping[str, str]) -> Finding:
    """Whether block hashes agree between processes."""
    seed = environ.get("PYTHONHASHSEED", "")
    if not seed:
        return warning(
            "hash seed",
            "PYTHONHASHSEED is not set",
            "vLLM up to 0.23 then starts block hashes from random bytes: blocks are stored and never found",
            "set PYTHONHASHSEED=0 (any one value) in the environment of every engine on every node",
        )
    if not seed.isdigit():
        return error(
            "hash seed",
            f"PYTHONHASHSEED is {seed!r}",
            "Python takes a number; `random` differs in every process, so nothing is ever hit",
            "set PYTHONHASHSEED=0 (any one number) on every node",
        )
    return well("hash seed", f"PYTHONHASHSEED={seed}; it must be this on every node")


def memory(settings: StoreSettings, pool: PoolSettings, num_ranks: int, meminfo: str = "") -> Finding:
    """Segments, buffers and staging of all ranks of this node against its memory."""
    a_rank = settings.global_segment_size + settings.local_buffer_size + pool.staging_bytes
    needed = a_rank * num_ranks
    text = meminfo or Path("/proc/meminfo").read_text(encoding="ascii")
    kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if ":" in line}
    available, total = kib.get("MemAvailable", 0) * 1024, kib.get("MemTotal", 0) * 1024
    words = f"{num_ranks} ranks x {in_bytes(a_rank)} = {in_bytes(needed)}; {in_bytes(available)} are free"
    room = int(available * 0.9) // num_ranks - settings.local_buffer_size - pool.staging_bytes
    remedy = f"set global_segment_size to at most {max(room, 0) >> 20}MB, or run fewer ranks on this node"
    if needed > total:
        return error("memory", f"{words} of {in_bytes(total)} in all", "workers fail at start, or are killed", remedy)
    if needed > available * 0.9:
        return warning("memory", words, "workers may fail at start, by chance, or be killed later", remedy)
    return well("memory", words)


def locked_memory(settings: StoreSettings, num_ranks: int, limit: int | None = None) -> Finding:
    """The limit on locked memory, where the transport locks what it registers."""
    a_rank = memory_to_lock(settings)
    if not a_rank:
        return well("locked memory", f"protocol {settings.protocol} locks nothing here")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return well("locked memory", "no limit")
    if soft < a_rank:
        return error(
            "locked memory",
            f"the limit is {in_bytes(soft)}, a rank registers {in_bytes(a_rank)}",
            f"registration of segments fails with protocol {settings.protocol}",
            "`ulimit -l unlimited` (in containers: --ulimit memlock=-1) for every engine",
        )
    return well("locked memory", f"{in_bytes(soft)} a process; a rank registers {in_bytes(a_rank)}")


def ports(settings: StoreSettings, knock: Callable[[str, int], None]) -> Finding:
    """Whether the way to the master is open: a client's own message does not tell what a firewall drops."""
    address = settings.master_server_address
    host, _, port = address.rpartition(":")
    try:
        knock(host.strip("[]"), int(port))
    except OSError as failure:
        return error(
            "ports",
            f"nothing answers at {address} ({failure})",
            "no engine finds the pool",
            "start mooncake_master with --rpc_address and --rpc_port as master_server_address says, and open the port "
            "between the machines",
        )
    return well("ports", f"the master's port answers at {address}; engines take free ports for transfers")


def lookup_directory(settings: StoreSettings, pool: PoolSettings) -> Finding:
    """Whether the lookup socket can be made, where one is needed."""
    if settings.protocol != "ascend":
        return well("lookup", f"protocol {settings.protocol}: the scheduler asks the store itself, no socket is needed")
    try:
        path = socket_path("doctor", pool.lookup_rpc_port, 0)
    except (PermissionError, OSError) as failure:
        return error("lookup", "the socket's directory cannot be used", "every lookup is a miss", str(failure))
    return well("lookup", f"local sockets in {path.parent}, for this user alone")


def machine_findings(
    settings: StoreSettings | None, pool: PoolSettings, num_ranks: int, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """All of them; what needs the configuration is skipped without it."""
    yield versions()
    yield hash_seed(environ)
    if settings is None:
        yield from (skipped(name, "no configuration") for name in ("memory", "locked memory", "lookup"))
        return
    yield memory(settings, pool, num_ranks)
    yield locked_memory(settings, num_ranks)
    yield lookup_directory(settings, pool)
