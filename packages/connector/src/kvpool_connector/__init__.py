"""KVPool: the KV-cache pool connector for vLLM on Ascend NPUs."""

__version__ = "0.1.0"
