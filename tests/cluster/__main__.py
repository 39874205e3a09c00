"""`python -m tests.cluster`: run seeds, print what came of them, and one line that shows a failure again."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.cluster.cluster import Outcome, keep_to_one_processor, run, run_seed
from tests.cluster.field_reports import held_rows
from tests.cluster.scenario import PROFILES, scenario


def main() -> int:
    """Exit status 1 when a seed showed a violation."""
    parser = argparse.ArgumentParser(prog="nox -s simulate --", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed alone, and say more")
    parser.add_argument("--seeds", type=int, default=60, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--profile", choices=PROFILES, default="swarm")
    parser.add_argument("--loads", type=int, default=0, help="go on with further seeds up to so many block loads")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes")
    asked = parser.parse_args()
    start = time.monotonic()
    if asked.seed is not None:
        logging.disable(logging.WARNING)
        outcomes = [run(scenario(asked.seed, asked.profile))]
        tell(outcomes[0])
    else:
        outcomes = list(many(asked))
    failed = sum(bool(outcome.violations) for outcome in outcomes)
    held, total = held_rows()
    print(
        f"{asked.profile}: {len(outcomes)} seeds, {sum(o.num_requests for o in outcomes)} requests, "
        f"{sum(o.num_steps for o in outcomes)} steps; checked byte by byte: {sum(o.num_loads for o in outcomes)} block "
        f"loads, {sum(o.num_audited for o in outcomes)} objects, {sum(o.num_rows for o in outcomes)} rows read; "
        f"{failed} seeds with violations; {time.monotonic() - start:.0f} s"
    )
    print(f"faults from the field: {held} of {total} are held by a test that carries their id (docs/field-reports.md)")
    return 1 if failed else 0


def many(asked: argparse.Namespace) -> Iterator[Outcome]:
    """Seeds one after the other, in several processes; failures are told at once."""
    first, loads = asked.first, 0
    context = multiprocessing.get_context("spawn")
    processors = context.SimpleQueue()
    for number in range(asked.jobs):
        processors.put(number)
    with ProcessPoolExecutor(asked.jobs, context, keep_to_one_processor, (processors,)) as pool:
        while loads < asked.loads if asked.loads else first < asked.first + asked.seeds:
            last = first + asked.jobs if asked.loads else asked.first + asked.seeds
            for outcome in pool.map(partial(run_seed, profile=asked.profile), range(first, last)):
                loads += outcome.num_loads
                if outcome.violations:
                    print(f"{outcome.violations[0]}\n  ({len(outcome.violations)} violations) {outcome.scenario}")
                    print(f"  replay: {outcome.replay}", flush=True)
                yield outcome
            first = last


def tell(outcome: Outcome) -> None:
    """Everything about one run."""
    print(outcome.scenario)
    print(*outcome.violations, sep="\n")
    if outcome.violations:
        print(f"replay: {outcome.replay}")
    print(f"counters {dict(sorted(outcome.counters.items()))}")
    print(f"faults {dict(sorted(outcome.faults.items()))}")
    print(f"{outcome.virtual_s:.3f} virtual seconds")


if __name__ == "__main__":
    sys.exit(main())
