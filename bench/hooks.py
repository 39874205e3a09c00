"""Time inside the connector's hooks on the real engine where the pool cannot help: no hits, saving off.

`python -m bench.hooks [--steps 200]`, in the engine's environment. Microseconds of the processor a decoding step, over
all hooks of both sides, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from tests.engine.engine import engine
from tests.engine.models import BLOCK_SIZE, make_model
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.targets.real_mooncake import real_master

NUM_REQUESTS = (1, 16, 64)


def measure(directory: Path, num_steps: int) -> dict[str, dict[str, int]]:
    """By number of running requests: median and 99th percentile."""
    found = {}
    with real_master(64 << 20, lease_s=5) as master:
        made = EngineSpec(
            make_model("gqa", directory),
            BLOCK_SIZE["gqa"],
            pool={"namespace": "hooks", "consumer_is_to_load": True},
            role="kv_consumer",
            mooncake_json=write_mooncake_json(directory / "mooncake.json", master.address),
            arguments={"max_model_len": 512, "max_num_seqs": max(NUM_REQUESTS)},
        )
        with engine(made) as running:
            for number in NUM_REQUESTS:
                prompts = [[(j * (i + number) + i) % 250 for j in range(40)] for i in range(number)]
                taken = running.perform("hook_seconds", prompts, num_steps)
                found[f"{number} running requests"] = {
                    "median_us": round(statistics.median(taken) * 1e6),
                    "p99_us": round(statistics.quantiles(taken, n=100)[-1] * 1e6),
                }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(Path(directory), parser.parse_args().steps), indent=2))


if __name__ == "__main__":
    main()
