"""Errors for misuse. A store's operating failures are never raised: see `kvpool_connector.contract.status`."""


class KVPoolError(Exception):
    """Base of every error that KVPool raises on purpose."""


class ConfigError(KVPoolError):
    """A setting is unknown, does not parse, or contradicts another. Raised at start."""


class LayoutError(KVPoolError):
    """A registered cache cannot be stored byte for byte. Raised at registration."""


class TopologyError(KVPoolError):
    """Ranks cannot share the KV cache as configured, or disagree about it. Raised before serving."""


class KeyFormatError(KVPoolError):
    """A text is not a key of this grammar."""


class DescriptorError(KVPoolError):
    """A text is not a descriptor, or not the one that its fingerprint stands for."""


class StoreSetupError(KVPoolError):
    """The store could not be reached or refused this client at start."""


class StoreClosedError(KVPoolError):
    """A store was used before it was connected or after it was closed."""
