"""The memory and caches of a simulated Ascend NPU, on torch CPU tensors.

Public names, one module a noun:

- `models`: `rank_spec(name, tp=, tp_rank=, pp=, pp_rank=, c8=, sparse=, mtp=, ...)` -> `CacheSpec`; `MODELS`, `Model`,
  `Gqa`, `Mla`, `head_range`, `stage_layers`.
- `families`: a `CacheSpec` for one layer: `gqa`, `mla`, `sparse_bundled`, `sparse_split`, `packed_main`,
  `indexer_cache`, `cache_only`, `gqa_310p`, ...
- `hybrids`: `mamba`, `attention_and_mamba`, `deepseek_v4`: layers of several groups, some on the same bytes.
- `variants`: `padded`, `in_kernel_blocks`, `in_one_storage`, `sharing`: a `CacheSpec` laid out otherwise.
- `spec`: `CacheSpec` and its parts (`Component`, `View`, `Region`, `RawTensor`, `Entry`); specs are added with `+`.
- `caches`: `allocate(spec, num_blocks, extra_blocks=0, kv_transfer=True)` -> `Caches`: `kv_caches` (what is
  registered), `pages`, `token_ranges`, `block_ranges`, `read`, `write`, `poison`, `check_guards`, `snapshot`.
- `content`: `fill(caches, block_id, prefix_hash)`, `check(...)` -> list of `Mismatch`; `page_content`, `stream`.
- `arena`: `Arena`, `Damage`, `Snapshot`, `POISON`, `GUARD`.
- `events`: `Stream`, `Event`.
"""

from kvpool_simulator.device.arena import GUARD, POISON, Arena, Damage, Snapshot
from kvpool_simulator.device.caches import Caches, allocate
from kvpool_simulator.device.content import Mismatch, check, fill
from kvpool_simulator.device.events import Event, Stream
from kvpool_simulator.device.models import MODELS, Model, rank_spec
from kvpool_simulator.device.spec import CacheSpec

__all__ = [
    "GUARD",
    "MODELS",
    "POISON",
    "Arena",
    "CacheSpec",
    "Caches",
    "Damage",
    "Event",
    "Mismatch",
    "Model",
    "Snapshot",
    "Stream",
    "allocate",
    "check",
    "fill",
    "rank_spec",
]
