"""Caches to be moved, as data: what a target is asked to allocate."""

from __future__ import annotations

from dataclasses import dataclass, replace

FAMILIES = ("gqa", "mla", "sparse-bundled", "sparse-split", "packed-main")
"""Families that go together with most other properties of a case."""
OTHER_FAMILIES = ("gqa-310p", "cache-only", "mamba", "attention-and-mamba", "deepseek-v4", "deepseek-v4-a5")
"""Families whose caches have one form each. The last four have states; the last three several KV cache groups in the
same memory, and there one content stands for a block of every group."""


@dataclass(frozen=True)
class CacheCase:
    """The caches of one rank. Dimensions are elements, blocks are the manager's."""

    family: str
    num_layers: int = 2
    block_size: int = 16
    num_blocks: int = 12
    dtype: str = "bfloat16"
    num_heads: int = 2
    """KV heads of the whole model (GQA)."""
    head_dim: int = 64
    v_head_dim: int = 64
    kv_lora_rank: int = 32
    rope_dim: int = 8
    rope_dtype: str = ""
    """Of `k_pe`, where it differs."""
    index_dim: int = 16
    c8: str = ""
    """How the indexer is quantised: not, `int8` (fp16 scales) or `fp8` (fp32 scales)."""
    indexer_copies: int = 1
    """Blocks of the indexer for each block of the attention: decode context parallelism of this size."""
    reserved: bool = False
    """The indexer's raw tensor is larger than what is used of it."""
    kv_nz: bool = False
    """Latent and rope in NZ order, which no shape tells."""
    layers_without_indexer: tuple[int, ...] = ()
    mtp: bool = False
    """One more layer, named as an MTP layer."""
    padding: int = 0
    """Bytes of hole behind each registered page."""
    kernel_blocks: int = 1
    """Registered pages that make one block."""
    spare_blocks: int = 0
    """Blocks in every tensor beyond the manager's."""
    one_storage: bool = False
    shared_layer: bool = False
    """The last layer registers the first one's tensors a second time."""

    def __str__(self) -> str:
        default = CacheCase(self.family)
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k) and k != "family"}
        return self.family + "".join(f" {name}={value}" for name, value in changed.items())


@dataclass(frozen=True)
class Deployment:
    """How an engine that holds such caches is set up."""

    case: CacheCase
    model: str = "model"
    tp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1
    """Tokens of one run under context parallelism (prefill, decode)."""
    namespace: str = "default"
    transfer: str = "auto"
    """`auto`, `packed`, `direct` or `layerwise`, where the backend offers them."""
    integrity: str = "off"
    """`off`, `sampled` or `on`, where the backend keeps checksums."""
    kv_head_split: str | tuple[int, ...] = "rank"
    """KV heads that share an object: `rank` all of a rank, `head` each its own, or as many as a rank of each of these
    tensor parallel sizes holds whole."""

    def with_case(self, **changes: object) -> Deployment:
        """The same with other caches."""
        return replace(self, case=replace(self.case, **changes))  # type: ignore[arg-type]


NAMED_CASES: dict[str, CacheCase] = {
    "gqa": CacheCase("gqa"),
    "gqa-other-v-head-size": CacheCase("gqa", v_head_dim=32),
    "gqa-float32": CacheCase("gqa", dtype="float32"),
    "mha": CacheCase("gqa", num_heads=8),
    "mla": CacheCase("mla"),
    "mla-two-dtypes": CacheCase("mla", dtype="int8", rope_dtype="bfloat16"),
    "sparse-bundled": CacheCase("sparse-bundled"),
    "sparse-bundled-c8": CacheCase("sparse-bundled", c8="int8"),
    "sparse-split": CacheCase("sparse-split"),
    "sparse-split-c8": CacheCase("sparse-split", c8="int8"),
    "sparse-split-c8-fp8": CacheCase("sparse-split", c8="fp8"),
    "packed-main-c8": CacheCase("packed-main", c8="int8"),
    "some-layers-without-indexer": CacheCase("sparse-bundled", num_layers=4, layers_without_indexer=(1, 3)),
    "mtp": CacheCase("sparse-split", mtp=True),
    "padded-block-stride": CacheCase("mla", padding=192),
    "more-blocks-than-the-manager": CacheCase("sparse-bundled", spare_blocks=3),
    "kernel-blocks": CacheCase("gqa", kernel_blocks=4),
    "padded-kernel-blocks": CacheCase("sparse-split", kernel_blocks=2, padding=64),
    "one-storage": CacheCase("mla", num_layers=3, one_storage=True),
    "shared-layer": CacheCase("gqa", num_layers=3, shared_layer=True),
    "packed-main-c8-fp8": CacheCase("packed-main", c8="fp8"),
    "packed-main-fp8": CacheCase("packed-main", dtype="float8_e4m3fn", c8="fp8"),
    "packed-main-656": CacheCase("packed-main", num_layers=1, kv_lora_rank=512, rope_dim=64, index_dim=128, c8="int8"),
    "some-layers-without-indexer-split": CacheCase(
        "sparse-split", num_layers=4, c8="int8", layers_without_indexer=(1, 2), mtp=True
    ),
    "sparse-bundled-reserved": CacheCase("sparse-bundled", reserved=True),
    "mla-nz": CacheCase("mla", rope_dim=16, kv_nz=True),
    "sparse-split-nz": CacheCase("sparse-split", rope_dim=16, kv_nz=True),
    "gqa-310p-nz": CacheCase("gqa-310p", dtype="float16"),
    "replicated-indexer": CacheCase("sparse-split", indexer_copies=2),
    "replicated-indexer-c8": CacheCase("sparse-split", c8="int8", indexer_copies=4),
    "cache-only": CacheCase("cache-only"),
    "cache-only-padded": CacheCase("cache-only", padding=96),
    "mamba-states": CacheCase("mamba"),
    "attention-and-mamba": CacheCase("attention-and-mamba"),
    "attention-and-mamba-kernel-blocks": CacheCase("attention-and-mamba", kernel_blocks=2),
    "deepseek-v4": CacheCase("deepseek-v4", block_size=32),
    "deepseek-v4-a5": CacheCase("deepseek-v4-a5", block_size=32),
}
"""One case for each thing that a layout can have."""
