"""The picture of docs/dashboard.md, from a real run.

    python -m tests.dashboard docs/dashboard.png [--seconds 150] [--prometheus prometheus] [--browser chromium]

Two OpenAI servers of vLLM on the CPU share a pool of real Mooncake, a real Prometheus asks their `/metrics` every
second, and a real browser takes the picture of a page that is laid out as the dashboard and drawn from what Prometheus
answers to the dashboard's own queries. In the middle of the run the master hangs for four seconds; later a bit is
flipped in every object. Everything listens on loopback only. Needs the environment of `nox -s engine`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvpool_connector.cli.endpoint import MasterEndpoint
from tests.dashboard.page import page
from tests.engine.models import BLOCK_SIZE, make_model
from tests.engine.spec import EngineSpec, write_mooncake_json
from tests.engine.test_server import complete, server
from tests.targets.real_mooncake import MooncakeTarget, RealMaster, free_port, real_master

ROOT = Path(__file__).parents[2]
PREFIXES, PREFIX_TOKENS, MORE_TOKENS = 60, 800, 60
HANGS_S = 4.0
POOL_BYTES = 64 << 20
POOL = {"integrity": "on", "audit_every": 4, "outage_pause_s": 2}


@contextmanager
def prometheus(program: str, directory: Path, targets: list[str]) -> Iterator[str]:
    """A Prometheus that asks the targets every second; its address."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": targets}]}],
    }
    path = directory / "prometheus.json"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    command = [program, f"--config.file={path}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def users(addresses: list[str], end: float, seed: int) -> None:
    """One user after another: some prefix that others use too, and a question of one's own, on any server."""
    dice = random.Random(seed)
    prefixes = [[random.Random(i).randrange(250) for _ in range(PREFIX_TOKENS)] for i in range(PREFIXES)]
    while time.time() < end:
        # More and more of the prefixes come into use.
        known = 5 + int((PREFIXES - 5) * max(0.0, 1 - (end - time.time()) / 120))
        prompt = prefixes[dice.randrange(min(known, PREFIXES))] + [dice.randrange(250) for _ in range(MORE_TOKENS)]
        complete(dice.choice(addresses), prompt)


def break_things(master: RealMaster, start: float, seconds: float) -> None:
    """The master hangs for a while; later no object is what was saved."""
    time.sleep(max(0.0, start + 0.4 * seconds - time.time()))
    master.stop()
    time.sleep(HANGS_S)
    master.go_on()
    time.sleep(max(0.0, start + 0.7 * seconds - time.time()))
    observer = MooncakeTarget(master.address)
    host, port = master.endpoint.split(":")
    keys = MasterEndpoint(host, int(port)).keys()
    for key in keys:
        value = observer.peek(key)
        # Not the descriptors.
        if value and not value.startswith(b"{"):
            observer.poke(key, 0, bytes([value[0] ^ 1]))
    observer.close()


def main() -> int:
    """Run, and take the picture."""
    parser = argparse.ArgumentParser(prog="python -m tests.dashboard")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--prometheus", default="prometheus")
    parser.add_argument("--browser", default="chromium")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dashboard = json.loads((ROOT / "docs" / "kvpool-dashboard.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        master = stack.enter_context(real_master(POOL_BYTES, lease_s=2))
        config = write_mooncake_json(directory / "mooncake.json", master.address)
        model = make_model("gqa", directory)
        spec = EngineSpec(model, BLOCK_SIZE["gqa"], pool=POOL, mooncake_json=config)
        small = ("--num-gpu-blocks-override", "160")
        addresses = [stack.enter_context(server(spec, directory / f"{i}.log", *small)) for i in range(2)]
        targets = [address.removeprefix("http://") for address in addresses]
        metrics = stack.enter_context(prometheus(asked.prometheus, directory, targets))
        time.sleep(3)
        start = time.time()
        threads = [
            threading.Thread(target=users, args=(addresses, start + asked.seconds, seed), daemon=True)
            for seed in range(3)
        ]
        threads.append(threading.Thread(target=break_things, args=(master, start, asked.seconds), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(asked.seconds + 60)
        time.sleep(3)
        text, width, height = page(dashboard, metrics, start, time.time())
        source = directory / "page.html"
        source.write_text(text, encoding="utf-8")
        command = [asked.browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={directory / 'browser'}", f"--window-size={width},{height}"]
        command += [f"--screenshot={asked.picture.absolute()}", source.as_uri()]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
