"""One engine saves, a fresh one loads; no test framework, all that was counted in view.

    python -m tests.engine.quick [gqa|mla|two-groups|linear] [kv_connector_extra_config as JSON]

Ends with 0 when the tokens are those of an engine without a connector and every whole block came from the pool.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.engine.engine import engine
from tests.engine.models import BLOCK_SIZE, KINDS, LINEAR, make_model
from tests.engine.prompts import PROMPTS, poolable
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.targets.real_mooncake import real_master


def main() -> int:
    """Three engines, a line each."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.quick")
    parser.add_argument("kind", nargs="?", choices=(*KINDS, LINEAR), default="gqa")
    parser.add_argument("extra", nargs="?", type=json.loads, default={})
    asked = parser.parse_args()
    block_size = BLOCK_SIZE[asked.kind]
    with tempfile.TemporaryDirectory() as directory, real_master(256 << 20) as master:
        model = make_model(asked.kind, Path(directory))
        config = write_mooncake_json(Path(directory) / "mooncake.json", master.address)
        plain = EngineSpec(model, block_size)
        pooled = EngineSpec(model, block_size, pool=asked.extra, mooncake_json=config)
        found = []
        for name, spec in (("without a connector", plain), ("computes and saves", pooled), ("loads", pooled)):
            started = time.monotonic()
            with engine(spec) as running:
                answers = running.generate(PROMPTS)
                hits, counts = [answer.num_cached_tokens for answer in answers], running.counts()
            found.append(([answer.tokens for answer in answers], hits))
            print(f"{name}: {time.monotonic() - started:.1f} s, cached tokens {hits}, {counts}", flush=True)
    identical = found[0][0] == found[1][0] == found[2][0]
    wanted = poolable(block_size)
    print(f"tokens identical: {identical}; cached tokens wanted: {wanted}")
    return 0 if identical and found[2][1] == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
