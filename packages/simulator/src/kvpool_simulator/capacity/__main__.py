"""The command. Exit status 2 for a wrong trace or wrong options; then nothing was written."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import NoReturn

from kvpool_simulator.capacity.picture import plot, table
from kvpool_simulator.capacity.replay import Fleet, Keys, Outcome, replay
from kvpool_simulator.capacity.trace import TraceError, read_trace, sample_trace
from kvpool_simulator.device.models import MODELS

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes of `256GB`, in powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected for example 256GB")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


class Parser(argparse.ArgumentParser):
    """Wrong options are told like a wrong trace."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        raise TraceError(f"{message}; `{self.prog} --help` lists the options")


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = Parser(prog="kvpool-capacity", description="Replay a request trace against sized pools.")
    made.add_argument(
        "trace", type=Path, nargs="?", help="JSON lines: timestamp, input_length, output_length, hash_ids"
    )
    made.add_argument("--model", default="deepseek-v3.2", choices=sorted(MODELS))
    made.add_argument("--pool-size", type=size, action="append", help="repeatable; default 256GB, 1TB, 4TB")
    made.add_argument("--instances", type=positive, action="append", help="repeatable; default 1")
    made.add_argument("--local-cache", type=size, default=size("32GB"), help="KV memory of one instance")
    made.add_argument("--prefill-tokens-per-s", type=positive, default=20_000, help="of one instance")
    made.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    made.add_argument("--plot", type=Path, help="write the picture here (SVG)")
    made.add_argument(
        "--sample", type=positive, metavar="N", help="write a made-up trace of N requests to TRACE instead"
    )
    made.add_argument("--seed", type=int, default=0, help="of the made-up trace")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return run(parser().parse_args(words))
    except (OSError, TraceError) as error:
        if "--json" in words:
            print(json.dumps({"error": str(error)}))
        else:
            print(f"kvpool-capacity: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """What was asked for. Raises `TraceError`, or `OSError` where a file cannot be read or written."""
    if options.trace is None:
        raise TraceError("name a trace: kvpool-capacity TRACE")
    if options.sample:
        if options.trace.exists():
            raise TraceError(f"{options.trace} is there already; --sample writes a new file")
        lines = (request.to_json() + "\n" for request in sample_trace(options.sample, options.seed))
        options.trace.write_text("".join(lines), encoding="utf-8")
        return 0
    if options.plot and (options.plot.is_dir() or not options.plot.parent.is_dir()):
        raise TraceError(f"--plot {options.plot} cannot be written; name a file in a directory that is there")
    requests = read_trace(options.trace)
    keys = Keys(options.model)
    outcomes: list[Outcome] = []
    pools = options.pool_size or [size("256GB"), size("1TB"), size("4TB")]
    fleets = [
        Fleet(options.model, pool_bytes, instances, options.local_cache, options.prefill_tokens_per_s)
        for instances in options.instances or [1]
        for pool_bytes in pools
    ]
    for done, fleet in enumerate(fleets):
        if sys.stderr.isatty():
            print(f"\rreplaying {done + 1} of {len(fleets)}", end="", file=sys.stderr, flush=True)
        outcomes.append(replay(requests, fleet, keys))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if options.json:
        rows = [
            {**vars(o), "fleet": vars(o.fleet), "hit_rate": o.hit_rate, "saved_prefill_s": o.saved_prefill_s}
            for o in outcomes
        ]
        print(json.dumps(rows, indent=1))
    else:
        print(f"{len(requests)} requests, {outcomes[0].prompt_tokens} prompt tokens, {options.model}")
        print(table(outcomes))
    if options.plot:
        options.plot.write_text(plot(outcomes, f"Hit rate by pool size, {options.model}"), encoding="utf-8")
    return 0


def command() -> None:
    """Entry point of `kvpool-capacity`."""
    raise SystemExit(main())


if __name__ == "__main__":
    command()
