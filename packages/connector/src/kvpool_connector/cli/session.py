"""Where a command finds the pool: settings, the master's endpoint, a client that gives no memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvpool_connector.cli.endpoint import DEFAULT_PORT, MasterEndpoint
from kvpool_connector.cli.output import CommandError
from kvpool_connector.cli.progress import Tell, silent
from kvpool_connector.config import MIB, PoolSettings, StoreSettings, parse
from kvpool_connector.contract.errors import ConfigError, StoreSetupError
from kvpool_connector.contract.store import Store
from kvpool_connector.mooncake import MooncakeStore

KNOCK_LIMIT_S = 3.0


def connect_mooncake(settings: StoreSettings, pool: PoolSettings) -> Store:
    """A connected client. Raises `StoreSetupError`."""
    store = MooncakeStore(settings, pool, bind_thread=device_binder(settings))
    store.connect()
    return store


def device_binder(settings: StoreSettings) -> Callable[[], None]:
    """What lets a thread use the device that the protocol copies with. Raises `StoreSetupError`."""
    if settings.protocol != "ascend":
        return lambda: None
    try:
        from kvpool_connector.ascend import AscendDevice

        return AscendDevice(0).bind_thread
    except (ImportError, ConfigError) as error:
        raise StoreSetupError(
            f"protocol 'ascend' needs an NPU, also for a client that gives no memory ({error}); run the command on a "
            "node of the pool, in the engine's environment"
        ) from error


def knock(host: str, port: int) -> None:
    """Opens a connection and closes it. Raises `OSError`."""
    socket.create_connection((host, port), KNOCK_LIMIT_S).close()


@dataclass
class Session:
    """One call of the command line."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    connect: Callable[[StoreSettings, PoolSettings], Store] = connect_mooncake
    knock: Callable[[str, int], None] = knock
    as_json: bool = False
    config: str = ""
    master: str = ""
    endpoint: str = ""
    protocol: str = ""
    tell: Tell = silent
    """Hears how far long work is."""

    def store_settings(self) -> StoreSettings:
        """What the environment and the options say. Raises `ConfigError`."""
        environ = dict(self.environ)
        if self.config:
            environ["MOONCAKE_CONFIG_PATH"] = self.config
        if self.master:
            environ["MOONCAKE_MASTER"] = self.master
        settings = StoreSettings.from_environment(environ)
        return parse(StoreSettings, settings.model_dump() | {"protocol": self.protocol or settings.protocol}, "options")

    def master_endpoint(self) -> MasterEndpoint:
        """The master's HTTP side: `--endpoint`, or the master's host at the default port."""
        text = self.endpoint
        if text and (self.config or self.master):
            self.store_settings()  # what was named and is wrong is told, needed or not
        if not text:
            host, _, _ = self.store_settings().master_server_address.rpartition(":")
            return MasterEndpoint(host.strip("[]"), DEFAULT_PORT, tell=self.tell)
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise CommandError(f'--endpoint {text!r} is not an address; expected "host:port", e.g. "10.0.0.1:9003"')
        return MasterEndpoint(host.strip("[]"), int(port), tell=self.tell)

    @contextmanager
    def store(self, pool: PoolSettings | None = None) -> Iterator[Store]:
        """A client that gives no memory to the pool; it leaves when the context ends."""
        settings = self.store_settings().model_copy(update={"global_segment_size": 0, "local_buffer_size": 16 * MIB})
        store = self.connect(settings, pool or PoolSettings())
        try:
            yield store
        finally:
            store.close()
