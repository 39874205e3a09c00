"""The connector's settings: frozen, strict records, parsed once at start.

Two sources, as users of vLLM-Ascend have them: `kv_connector_extra_config` of the engine (`PoolSettings`) and
`mooncake.json` with environment variables above it (`StoreSettings`). An unknown key is an error that names the
nearest known one.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kvpool_connector.contract.errors import ConfigError
from kvpool_connector.contract.topology import HeadSplit

MIB = 1 << 20
GIB = 1 << 30
MAX_FILE_BYTES = MIB
"""Of `mooncake.json`; whatever a path leads to, no more is read."""
MIN_SEGMENT_BYTES = 16 * MIB
"""Mooncake 0.3.13 refuses smaller segments, except none at all."""

DEFAULT_TENANT = "default"

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)


MAX_SHOWN = 500
"""Characters of a wrong setting, and of what is said of it, in an error."""


def parse_size(value: object) -> int:
    """Bytes of `1073741824`, `"1GB"`, `"10GiB"`, `"512MB"`: units are powers of 1024, as Mooncake reads them.

    Raises `ValueError` for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'{value!r} is not a size; expected bytes or a text like "1GB", "10GiB", "512MB"')
    size = float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " ")
    if size >= 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is more bytes than any machine has")
    return int(size)


def _tenant(value: object) -> object:
    """As vLLM-Ascend reads it: nothing, or blanks, is the default tenant."""
    text = "" if value is None else value
    return (text.strip() or DEFAULT_TENANT) if isinstance(text, str) else text


def _partition(value: object) -> object:
    """`"30,31"` as numbers; nothing is no partition."""
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        return value
    if not all(part.strip().isdecimal() for part in value.split(",")):
        raise ValueError(f'{value[:80]!r} is not a partition; expected the layers of each stage, for example "30,31"')
    return tuple(int(part) for part in value.split(","))


def _head_split(value: object) -> object:
    sizes = value if isinstance(value, list | tuple) else ()
    if value in ("rank", "head") or (sizes and all(type(size) is int and size > 0 for size in sizes)):
        return value
    raise ValueError(
        f'{value!r} is unknown; expected "rank", "head", or a list of all tensor parallel sizes that share, for '
        "example [4, 8]"
    )


Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema({"type": "integer", "format": "size"})]
Seconds = Annotated[float, Field(gt=0, le=3600)]


class _Settings(BaseModel):
    """What is said under a field is its meaning in `docs/configuration.md`, which
    `python -m tests.docs.configuration` writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class StoreSettings(_Settings):
    """How this process reaches Mooncake and what memory it gives."""

    master_server_address: str
    """`host:port` of `mooncake_master`."""
    metadata_server: str = "P2PHANDSHAKE"
    """As in Mooncake."""
    protocol: Literal["tcp", "rdma", "ascend"] = "ascend"
    """How Mooncake moves bytes."""
    device_name: str = ""
    """As in Mooncake."""
    local_hostname: str = ""
    """The name under which other machines reach this one; empty: this machine's address on the way to the master, so
    loopback for a master on loopback."""
    global_segment_size: Size = GIB
    """Memory that each worker gives to the pool: 0, or at least 16 MiB."""
    local_buffer_size: Size = GIB
    """Mooncake's own transfer buffer."""
    preferred_segment: bool = False
    """Store in this worker's own segment while it has room."""
    prefer_alloc_in_same_node: bool = True
    """Handed on to Mooncake, which placed objects at random all the same (0.3.13)."""
    tenant_id: Annotated[str, BeforeValidator(_tenant)] = DEFAULT_TENANT
    """Mooncake's tenant, of effect on a master with `--enable_multi_tenants`; equal on all that share."""
    enable_ssd_offload: Literal[False] = False
    """The only value so far."""
    ssd_offload_path: str = ""
    """Accepted, of no effect."""
    fabric_memory: bool = False
    """Whether device and host memory are one address space (Atlas A3, protocol `ascend`). Not in this file:
    `ASCEND_ENABLE_USE_FABRIC_MEM=1` in the environment sets it, for Mooncake too. Then `global_segment_size` is in
    whole GiB, nothing is registered, and `local_buffer_size` is taken for 0."""

    @field_validator("global_segment_size")
    @classmethod
    def _segment_is_none_or_large_enough(cls, value: int) -> int:
        if 0 < value < MIN_SEGMENT_BYTES:
            raise ValueError(
                f"{value} bytes is too small for a segment; expected 0 (this instance gives no memory) or at least "
                f"{MIN_SEGMENT_BYTES} (16 MiB)"
            )
        return value

    @model_validator(mode="after")
    def _fabric_memory_is_given_in_gib(self) -> Self:
        if self.fabric_memory and self.global_segment_size % GIB:
            raise ValueError(
                f"global_segment_size = {self.global_segment_size} with ASCEND_ENABLE_USE_FABRIC_MEM=1: fabric memory "
                f"is given in whole GiB; set global_segment_size to {-(-self.global_segment_size // GIB)}GB"
            )
        return self

    @field_validator("master_server_address")
    @classmethod
    def _address_has_host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f'{value!r} is not an address; expected "host:port", for example "127.0.0.1:50051"')
        return value

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> StoreSettings:
        """Settings from the file that `MOONCAKE_CONFIG_PATH` names, under `MOONCAKE_MASTER` and its like.

        Raises `ConfigError` when the file cannot be read or a setting is wrong.
        """
        path = environ.get("MOONCAKE_CONFIG_PATH")
        values: dict[str, Any] = {}
        if path:
            try:
                with Path(path).open("rb") as file:
                    text = file.read(MAX_FILE_BYTES + 1)
                if len(text) > MAX_FILE_BYTES:
                    raise ConfigError(f"MOONCAKE_CONFIG_PATH={path}: more than {MAX_FILE_BYTES} bytes; no settings are")
                values = json.loads(text)
            except (OSError, ValueError, RecursionError) as error:
                raise ConfigError(f"MOONCAKE_CONFIG_PATH={path}: not readable as JSON: {error}") from error
            if not isinstance(values, dict):
                raise ConfigError(f"MOONCAKE_CONFIG_PATH={path}: found {type(values).__name__}; expected a JSON object")
        for variable, key in (
            ("MOONCAKE_MASTER", "master_server_address"),
            ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "global_segment_size"),
            ("MOONCAKE_LOCAL_HOSTNAME", "local_hostname"),
            ("MOONCAKE_TENANT_ID", "tenant_id"),
        ):
            if variable in environ:
                values[key] = environ[variable]
        if "master_server_address" not in values:
            raise ConfigError(
                "no master is named: set MOONCAKE_CONFIG_PATH to a mooncake.json with master_server_address, or "
                "MOONCAKE_MASTER to host:port"
            )
        if "fabric_memory" in values:
            raise ConfigError(
                f"{path}: fabric_memory is no key of this file; Mooncake reads it from the environment: set "
                "ASCEND_ENABLE_USE_FABRIC_MEM=1"
            )
        if environ.get("ASCEND_ENABLE_USE_FABRIC_MEM") == "1" and values.get("protocol", "ascend") == "ascend":
            values["fabric_memory"] = True
        return parse(cls, values, path or "the environment")


class PoolSettings(_Settings):
    """`kv_connector_extra_config`: first what vLLM-Ascend's users know, then what is KVPool's own."""

    backend: Literal["mooncake"] = "mooncake"
    """The only one."""
    lookup_rpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Names the local socket through which the scheduler asks the first worker where it cannot have a store client of
    its own (protocol `ascend`)."""
    load_async: bool = False
    """Load between steps instead of in front of one; always so for models with several KV cache groups."""
    consumer_is_to_put: bool = False
    """A `kv_consumer` saves too."""
    consumer_is_to_load: bool = False
    """A `kv_consumer` loads too."""
    save_decode_cache: bool = False
    """Also save blocks of generated tokens, so that the next turn of a chat hits them."""
    discard_partial_chunks: Literal[True] = True
    """The only value: whole blocks are saved."""
    use_layerwise: Literal[False, True, "auto"] = False
    """`true`: load and save [layer by layer](layerwise.md) while a step computes; `auto`: in those steps where a model
    of its cost says that it pays."""
    layerwise_prefetch_layers: Annotated[int, Field(ge=1)] | None = None
    """How many layers loads run ahead of the one that computes; none: as many as the transport manages."""
    prefill_pp_size: Annotated[int, Field(ge=1)] | None = None
    """Objects are cut along the layers as a pipeline of so many stages holds them, so that
    [engines with other pipelines](#other-pipelines) share; none: as this engine's own stages do."""
    prefill_pp_layer_partition: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...] | None, BeforeValidator(_partition)
    ] = None
    """Layers of each of these stages, also as a text: `"30,31"`; none: vLLM's even partition."""

    namespace: Annotated[str, Field(min_length=1, max_length=128)] = "default"
    """Deployments share KV only within a namespace."""
    model_id: str | None = None
    """Identity of the weights, where the same model has other paths on other machines; none: the model's path."""
    transfer: Literal["auto", "direct", "packed", "learnt"] = "auto"
    """`packed` moves a block through one staging buffer, `direct` piece by piece from and to the cache, `learnt` by the
    way that proves faster while serving. `auto`: `learnt` over TCP where the store prefers this worker's own segment,
    unless checksums or audits are asked for; else `packed`."""
    kv_head_split: Annotated[HeadSplit, BeforeValidator(_head_split)] = "rank"
    """Which KV heads share an object, so that [engines of other tensor parallel sizes](#kv_head_split) find it: all
    that a rank holds, each its own, or as many as a rank of every size in a list such as `[4, 8]` holds whole."""
    cache_order: Literal["auto", "ND", "HND", "NZ"] = "auto"
    """Byte order of a cache page, which the tensors do not tell. `auto`: `NZ` where vLLM-Ascend's `enable_kv_nz` is on,
    else `ND`, and a page whose shape fits two orders is refused. A 310P needs `NZ` (with `ND` it is refused at start);
    `HND` is heads before tokens."""
    integrity: Literal["off", "sampled", "on"] = "off"
    """`on`: every object carries a checksum a component, compared at every load; `sampled`: at one in sixteen. A broken
    object is removed, its block computed. Needs packed transfer."""
    audit_every: Annotated[int, Field(ge=0)] = 0
    """Of so many blocks stored, one is read back at once and compared with what was handed over
    ([Integrity](integrity.md)); 0: none is. Needs packed transfer."""
    layerwise_layers_per_transfer: Annotated[int, Field(ge=1)] | None = None
    """Layers that are moved together; none: as many as [the cost model](layerwise.md#when-it-pays) takes for best."""
    layerwise_session_limit_s: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Age at which an unfinished object is given up. Must lie below the master's `--put_start_discard_timeout_sec`
    (30 by default), and never anywhere near its `--put_start_release_timeout_sec`."""
    layerwise_renew_s: Annotated[float, Field(gt=0)] = 2.0
    """Age at which the protection of an object being read is renewed. Must lie below the master's
    `--default_kv_lease_ttl` less the time of one transfer."""
    remember_requests: Annotated[int, Field(ge=0)] = 1000
    """Requests whose last lookup an engine remembers for
    [`kvpool explain --request-id`](command-line.md#why-did-this-miss); 0: none."""
    staging_bytes: Size = 256 * MIB
    """Bound of the staging area of a rank; three objects must fit."""
    max_buffers_per_call: Annotated[int, Field(ge=1)] = 1900
    """Pieces in one call of the store: Mooncake over TCP fails or hangs above about 2,048 in flight."""
    max_bytes_per_call: Size = 256 * MIB
    """Bytes in one call of the store, so that one read stays well inside the lease."""
    min_tokens_to_load: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """Fewer tokens than these are computed though the pool has them; `auto`:
    [learnt while serving](#min_tokens_to_load)."""
    max_queued_blocks: Annotated[int, Field(ge=1)] = 16384
    """Blocks that may wait to be saved; more are dropped and counted."""
    setup_timeout_s: Seconds = 15.0
    """Bound of reaching the master at start."""
    lookup_timeout_s: Seconds = 1.0
    """Bound of a lookup; after it the prompt is computed."""
    load_timeout_s: Seconds = 20.0
    """Bound of a load; what has not landed is computed."""
    fence_timeout_s: Annotated[float, Field(ge=0, le=10)] = 0.05
    """How long a step waits for queued saves of blocks that it overwrites; 0: not at all."""
    outage_pause_s: Seconds = 5.0
    """After a sign of outage the store is left alone so long."""
    drain_timeout_s: Seconds = 10.0
    """How long a shutdown waits for queued saves."""

    @model_validator(mode="after")
    def _partition_has_a_size_a_stage(self) -> Self:
        sizes = self.prefill_pp_layer_partition
        if sizes and self.prefill_pp_size not in (None, len(sizes)):
            raise ValueError(
                f"prefill_pp_layer_partition = {','.join(map(str, sizes))!r} has {len(sizes)} stages, but "
                f"prefill_pp_size = {self.prefill_pp_size}; set prefill_pp_size to {len(sizes)}"
            )
        return self

    @model_validator(mode="after")
    def _checksums_are_made_in_staging(self) -> Self:
        for name, asked, none in (
            ("integrity", self.integrity != "off", "off"),
            ("audit_every", self.audit_every > 0, 0),
        ):
            if asked and self.transfer in ("direct", "learnt"):
                raise ValueError(
                    f'{name} = {getattr(self, name)!r} needs the staging area; set transfer to "packed" or "auto", or '
                    f"{name} to {json.dumps(none)}"
                )
        return self

    def beside(self, store: StoreSettings) -> Self:
        """These settings, with what is `auto` decided where the store decides it.

        Where it prefers this process's own memory, whole objects are copied within the process, while ranges go over
        the transport, and one copy may be faster than two.
        """
        own_memory = store.preferred_segment and store.global_segment_size > 0
        decided: dict[str, object] = {}
        if self.use_layerwise == "auto" and own_memory:
            decided["use_layerwise"] = False
        if self.transfer == "auto":
            checked = self.integrity != "off" or self.audit_every > 0
            learns = own_memory and store.protocol == "tcp" and not checked
            decided["transfer"] = "learnt" if learns else "packed"
        return self.model_copy(update=decided)

    @classmethod
    def from_extra_config(cls, values: Mapping[str, Any]) -> PoolSettings:
        """Settings from the engine's `kv_connector_extra_config`. Raises `ConfigError`."""
        return parse(cls, values, "kv_connector_extra_config")


Record = TypeVar("Record", bound=BaseModel)


def parse(record: type[Record], values: Mapping[str, Any], source: str) -> Record:
    """`values` as a `record`; all that is wrong with them in one `ConfigError`."""
    try:
        return record.model_validate(dict(values))
    except ValidationError as error:
        faults = [_fault(record, fault["loc"], fault["type"], fault["msg"], fault["input"]) for fault in error.errors()]
        raise ConfigError(f"{source}: " + "; ".join(faults)) from error


def _fault(record: type[BaseModel], location: tuple[int | str, ...], kind: str, message: str, found: object) -> str:
    name = ".".join(map(str, location))[:MAX_SHOWN]
    shown = repr(found)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
    if kind == "extra_forbidden":
        nearest = difflib.get_close_matches(name, record.model_fields, n=1, cutoff=0.0)[0]
        return f"unknown key {name!r}; the nearest known one is {nearest!r}"
    if kind == "literal_error":
        return f"{name} = {shown} is not supported (yet); {message.lower()}"
    return f"{name} = {shown}: {message.removeprefix('Value error, ')[:MAX_SHOWN]}"
