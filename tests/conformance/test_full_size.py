"""DeepSeek-V3.2 at full size: 61 layers, 183 buffers a block, 64 blocks of 11 MB in one request, between processes."""

from __future__ import annotations

import pytest

from kvpool_conformance.cases import CacheCase, Deployment
from kvpool_conformance.suites.round_trip import fresh, load_all, moved, save_all
from tests.targets.target import Target

NUM_BLOCKS = 64
V32 = CacheCase(
    "sparse-bundled",
    num_layers=61,
    block_size=128,
    num_blocks=NUM_BLOCKS,
    kv_lora_rank=512,
    rope_dim=64,
    index_dim=128,
)
STAGING_BYTES = 256 << 20


@pytest.mark.kvpool_capability("full size")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transfer", ["packed", "direct", "learnt"])
def test_sixty_four_blocks_in_one_request(backend: Target, transfer: str) -> None:
    deployment = Deployment(V32, model=f"deepseek-v3.2 {transfer}", transfer=transfer)
    contents = {block_id: fresh() for block_id in range(NUM_BLOCKS)}
    with backend.node(deployment, elsewhere=True, staging_bytes=STAGING_BYTES) as source:
        save_all(source, contents)
    with backend.node(deployment, staging_bytes=STAGING_BYTES) as target:
        assert target.hits(list(contents.values())) == NUM_BLOCKS
        load_all(target, moved(contents, [(block_id * 37 + 5) % NUM_BLOCKS for block_id in range(NUM_BLOCKS)]))
        for content in contents.values():
            backend.lose(deployment, 0, content)
