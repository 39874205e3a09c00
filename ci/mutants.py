"""Mutation testing of the parts whose mistakes are silent: how many planted mistakes do the unit tests find?

`python ci/mutants.py DIRECTORY`: a copy of `packages/connector`, whose `pyproject.toml` says what is mutated. Fails
when less than 90 % are found, or when one that is not found has no reason in `ci/surviving_mutants.toml`.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

AT_LEAST = 0.9
REASONS = Path(__file__).with_name("surviving_mutants.toml")
NOT_FOUND = ("survived", "no tests")


def mutmut(directory: Path, *arguments: str) -> str:
    """Run the tool; its progress goes to the screen, its answers come back."""
    command = [sys.executable, "-m", "mutmut", *arguments]
    return subprocess.run(command, cwd=directory, check=True, stdout=subprocess.PIPE, text=True).stdout


def outcomes(directory: Path) -> dict[str, str]:
    """Every mutant's name and what became of it."""
    lines = (line.strip().split(": ") for line in mutmut(directory, "results", "--all", "true").splitlines())
    return {parts[0]: parts[1] for parts in lines if len(parts) == 2}


def change(directory: Path, mutant: str) -> tuple[str, str]:
    """What the mutant does: the lines it takes out and the lines it puts in, each as one line."""
    shown = mutmut(directory, "show", mutant).splitlines()
    sides = [[line[1:].strip() for line in shown if line.startswith(sign) and line[1:2] == " "] for sign in "-+"]
    return " ".join(sides[0]), " ".join(sides[1])


def main(directory: Path) -> int:
    """Run all mutants, print the rate and the survivors without a reason."""
    subprocess.run([sys.executable, "-m", "mutmut", "run", "--max-children", "2"], cwd=directory, check=True)
    found = outcomes(directory)
    counts = Counter(found.values())
    survivors = [mutant for mutant, outcome in found.items() if outcome in NOT_FOUND]
    rate = 1 - len(survivors) / len(found)
    entries = tomllib.loads(REASONS.read_text(encoding="utf-8")).get("survivor", [])
    listed = {(entry["old"], entry["new"]) for entry in entries}
    changes = {mutant: change(directory, mutant) for mutant in survivors}
    without_reason = {mutant: lines for mutant, lines in changes.items() if lines not in listed}
    for mutant, (old, new) in without_reason.items():
        print(f"\n# {mutant}\n[[survivor]]\nold = '''{old}'''\nnew = '''{new}'''\nreason = \"\"")
    for old, new in listed - set(changes.values()):
        print(f"no survivor any more, take it out of {REASONS.name}: {old!r} -> {new!r}")
    print(f"\nmutants: {dict(counts)}; found {rate:.1%}, at least {AT_LEAST:.0%} wanted")
    print(f"survivors without a reason: {len(without_reason)}")
    return int(rate < AT_LEAST or bool(without_reason))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
