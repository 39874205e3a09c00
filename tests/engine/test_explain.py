"""`kvpool explain` hashes as the engine does."""

from __future__ import annotations

import pytest

from kvpool_connector.cli.hashes import ALGORITHMS, block_hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("salt", ["", "s"])
def test_hashes_are_the_engines(algorithm: str, salt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    monkeypatch.setenv("PYTHONHASHSEED", "41")
    digest = get_hash_fn_by_name(algorithm)
    init_none_hash(digest)
    tokens = [*range(1000, 1040), 2**20, 3]
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(),
        pooling_params=None,
        cache_salt=salt or None,
        block_hasher=get_request_block_hasher(16, digest),
    )
    assert len(request.block_hashes) == 2
    assert [bytes(h) for h in request.block_hashes] == block_hashes(tokens, 16, "41", algorithm, salt)
