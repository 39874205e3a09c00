"""Caches of named models in this process's memory: what `doctor` and `bench` move through the store.

Dimensions are those of the models' public configurations; one rank of a tensor-parallel engine.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
from numpy.typing import NDArray

from kvpool_connector.cli.output import CommandError
from kvpool_connector.contract.layout import Component, Layer, ShardLayout
from kvpool_connector.host import HostDevice

ModelShape = tuple[int, tuple[tuple[str, int], ...]]
"""Layers, and for each component its name and the bf16 elements a token (before heads are split)."""

LATENT = (("k_nope", 512), ("k_pe", 64))
MODELS: dict[str, ModelShape] = {
    "deepseek-v3.2": (61, (*LATENT, ("dsa_k", 128))),
    "deepseek-v3": (61, LATENT),
    "qwen3-8b": (36, (("k", 8 * 128), ("v", 8 * 128))),
    "qwen3-32b": (64, (("k", 8 * 128), ("v", 8 * 128))),
    "qwen3-30b-a3b": (48, (("k", 4 * 128), ("v", 4 * 128))),
    "qwen3-235b-a22b": (94, (("k", 4 * 128), ("v", 4 * 128))),
}


class NamedCache:
    """`num_blocks` blocks of a model's cache, each component of each layer a dense run of pages."""

    def __init__(self, model: str, num_blocks: int, block_size: int = 128, tp_size: int = 1, pp_size: int = 1) -> None:
        """The layers of the largest pipeline stage. Raises `CommandError` for what is not listed or does not split."""
        if model not in MODELS:
            raise CommandError(f"--model {model!r} is not listed; expected one of {', '.join(MODELS)}")
        all_layers, components = MODELS[model]
        if pp_size > all_layers:
            raise CommandError(f"--pipeline-parallel-size {pp_size} leaves stages of {model} without any of its layers")
        num_layers = len(range(0, all_layers, pp_size))
        pages = [(name, block_size * self._width(model, name, width, tp_size) * 2) for name, width in components]
        block_bytes = num_layers * sum(size for _, size in pages)
        self._buffer = HostDevice().allocate(num_blocks * block_bytes, 2 << 20)
        self.num_blocks = num_blocks
        layers, address = [], self._buffer.address
        for index in range(num_layers):
            found = []
            for name, size in pages:
                shape = (block_size, size // 2 // block_size)
                found.append(Component(name, "bfloat16", shape, "NHD", address, size, size))
                address += num_blocks * size
            layers.append(Layer(str(index), (f"layers.{index}",), tuple(found)))
        self.layout = ShardLayout(0, block_size, num_blocks, tuple(layers))

    @staticmethod
    def _width(model: str, name: str, width: int, tp_size: int) -> int:
        if name not in ("k", "v"):
            return width
        heads = width // 128
        if heads % tp_size and tp_size % heads:
            raise CommandError(f"--tensor-parallel-size {tp_size} splits the {heads} KV heads of {model}")
        return max(1, heads // tp_size) * 128

    @property
    def address(self) -> int:
        """Start of the memory."""
        return self._buffer.address

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self._buffer.num_bytes

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """All bytes of one block, copied."""
        whole = np.frombuffer(self._view(), np.uint8)
        start = self.address
        return np.concatenate(
            [
                whole[address - start : address - start + size]
                for component in self.layout.components
                for address, size in component.pieces(block_id)
            ]
        )

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        self._write(np.random.default_rng(seed).integers(0, 256, self.num_bytes, np.uint8))

    def poison(self) -> None:
        """Bytes that were never stored."""
        self._write(np.full(self.num_bytes, 0xA5, np.uint8))

    def _write(self, values: NDArray[np.uint8]) -> None:
        np.frombuffer(self._view(), np.uint8)[:] = values

    def _view(self) -> memoryview:
        owner = self._buffer.owner
        assert isinstance(owner, mmap.mmap)
        start = self.address - ctypes.addressof(ctypes.c_char.from_buffer(owner))
        return memoryview(owner)[start : start + self.num_bytes]
