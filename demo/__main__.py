"""Two engines, one pool: what a newcomer runs first.

Engine 1 computes prompts made of this repository's own documents and saves their KV blocks; engine 2, a fresh process,
loads them. A third engine without a connector says what the tokens should be and how long the first one takes.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.engine.engine import engine
from tests.engine.models import make_model
from tests.engine.serving import Answer
from tests.engine.spec import EngineSpec, write_mooncake_json

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/architecture.md", "docs/keys.md", "CONTRIBUTING.md")
PROMPT_TOKENS = 3000
BLOCK_SIZE = 128
SEGMENT_BYTES = 512 << 20
SYSTEM_PACKAGES = "libibverbs1 librdmacm1 libnuma1 liburing2"


@contextmanager
def pool(console: Console) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """A pool with memory: its master's address, what it is, and what an engine's process must patch."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        console.print(f"[yellow]Mooncake cannot be imported ({error}); going on with the simulated store.")
        console.print(f"To have the real one: apt-get update && apt-get install -y {SYSTEM_PACKAGES}")
        with simulated() as address:
            yield address, "the simulated store", ("tests.engine.faults:simulated_store",)
        return
    from tests.targets.real_mooncake import real_master

    with real_master(SEGMENT_BYTES) as master:
        yield master.address, "real Mooncake over TCP", ()


@contextmanager
def simulated() -> Iterator[str]:
    """A simulated master that other processes reach."""
    from kvpool_connector.contract.clock import MonotonicClock
    from kvpool_simulator.store import MooncakeDistributedStore, SimulatedMaster

    with SimulatedMaster(clock=MonotonicClock(), serve=True) as master:
        owner = MooncakeDistributedStore()
        owner.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, 0, "tcp", "", master.address)
        try:
            yield master.address
        finally:
            owner.close()


def prompts() -> dict[str, list[int]]:
    """The beginning of each document, a token a byte."""
    found = {name: (ROOT / name).read_bytes()[:PROMPT_TOKENS] for name in DOCUMENTS}
    return {name: [byte % 256 for byte in text] for name, text in found.items()}


def ask(spec: EngineSpec, questions: dict[str, list[int]], progress: Progress, what: str) -> dict[str, Answer]:
    """Start an engine, ask each question alone, shut it down."""
    task = progress.add_task(f"{what}: starting", total=None)
    with engine(spec) as running:
        # The first request of an engine pays for warming up.
        running.generate([[1, 2, 3]], max_tokens=1)
        answers = {}
        for i, (name, prompt) in enumerate(questions.items()):
            progress.update(task, description=f"{what}: {name}", total=len(questions), completed=i)
            (answers[name],) = running.generate([prompt], max_tokens=16)
        progress.update(task, description=f"{what}: done", completed=len(questions))
    return answers


def main() -> int:
    """Run the demo; 0 when every token is identical and every whole block came from the pool."""
    console = Console()
    questions = prompts()
    with tempfile.TemporaryDirectory() as directory, pool(console) as (address, kind, patches):
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("making a model with random weights", total=None)
            model = make_model("gqa", Path(directory), num_layers=8, hidden_size=512)
            progress.update(task, description="made a model with random weights", total=1, completed=1)
            config = write_mooncake_json(Path(directory) / "mooncake.json", address)
            plain = EngineSpec(model, BLOCK_SIZE)
            pooled = EngineSpec(model, BLOCK_SIZE, pool={}, mooncake_json=config, patches=patches)
            without = ask(plain, questions, progress, "engine without a connector")
            saving = ask(pooled, questions, progress, "engine 1 computes and saves")
            loading = ask(pooled, questions, progress, "engine 2 loads")
    table = Table(title=f"Two engines, one pool ({kind})")
    for name in ("prompt", "tokens", "pool", "same", "first token", "with pool", "faster"):
        table.add_column(name, justify="left" if name == "prompt" else "right", no_wrap=name == "prompt")
    good = True
    for name, prompt in questions.items():
        hit = loading[name].num_cached_tokens
        identical = without[name].tokens == saving[name].tokens == loading[name].tokens
        good &= identical and hit == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        before, after = without[name].first_token_s, loading[name].first_token_s
        table.add_row(
            Path(name).name,
            str(len(prompt)),
            str(hit),
            "yes" if identical else "[red]NO",
            f"{before * 1000:.0f} ms",
            f"{after * 1000:.0f} ms",
            f"{before / after:.1f} x",
        )
    console.print(table)
    console.print("Every token is the same as without a pool." if good else "[red]The pool did not do what it must.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
