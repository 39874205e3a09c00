"""`python -m tests.cluster`: run seeds, print what came of them, and one line that shows a failure again."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.cluster.cluster import Outcome, run
from tests.cluster.scenario import PROFILES, scenario


def main() -> int:
    """Exit status 1 when a seed showed a violation."""
    parser = argparse.ArgumentParser(prog="nox -s simulate --", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed alone, and say more")
    parser.add_argument("--seeds", type=int, default=60, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--profile", choices=PROFILES, default="swarm")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL if asked.seed is None else logging.ERROR)
    seeds = [asked.seed] if asked.seed is not None else range(asked.first, asked.first + asked.seeds)
    totals: Counter[str] = Counter()
    failed: list[Outcome] = []
    start = time.monotonic()
    for seed in seeds:
        began = time.monotonic()
        outcome = run(scenario(seed, asked.profile))
        totals.update(
            seeds=1,
            loads=outcome.num_loads,
            audited=outcome.num_audited,
            rows=outcome.num_rows,
            steps=outcome.num_steps,
            requests=outcome.num_requests,
        )
        if outcome.violations:
            failed.append(outcome)
            print(f"{outcome.violations[0]}\n  ({len(outcome.violations)} violations) {outcome.scenario}")
            print(f"  replay: {outcome.replay}", flush=True)
        elif asked.seed is not None:
            print(outcome.scenario)
        if asked.seed is not None:
            print(*outcome.violations, sep="\n")
            print(dict(sorted(outcome.counters.items())), dict(outcome.faults))
            print(f"{outcome.virtual_s:.3f} virtual seconds in {time.monotonic() - began:.2f}")
    print(
        f"{asked.profile}: {totals['seeds']} seeds, {totals['requests']} requests, {totals['steps']} steps, "
        f"{totals['loads']} block loads and {totals['audited']} objects checked byte by byte, "
        f"{totals['rows']} rows read, {len(failed)} seeds with violations, {time.monotonic() - start:.1f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
