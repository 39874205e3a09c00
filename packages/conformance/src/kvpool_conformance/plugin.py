"""The suite as a pytest plugin: which targets are judged, and what was found, target by target.

Options: `--kvpool-target NAME` (repeatable; a target that cannot be reached is an error), `--kvpool-if-there NAME`
(repeatable; a target that cannot be reached is named as not run), `--kvpool-report FILE` (JSON). It loads no Hypothesis
profile; `--hypothesis-seed` replays.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

MARK = "kvpool_conformance"
CLAIM = "claim"
TOTALS = pytest.StashKey[dict[str, Counter[str]]]()
NOT_RUN = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """See the module."""
    group = parser.getgroup("kvpool")
    group.addoption("--kvpool-target", action="append", default=[], metavar="NAME", help="a target to judge")
    group.addoption("--kvpool-if-there", action="append", default=[], metavar="NAME", help="the same, if it is there")
    group.addoption("--kvpool-report", default=None, metavar="FILE", help="write the result as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Markers and places for results."""
    config.addinivalue_line("markers", f"{MARK}(target): a conformance test of one target")
    config.addinivalue_line("markers", "claim(id, text): a claim about a store, tested on every target")
    config.stash[TOTALS] = {}
    config.stash[NOT_RUN] = {}


def not_run(config: pytest.Config, target: str, reason: str) -> None:
    """Note that a target was not run, and why."""
    config.stash[NOT_RUN][target] = reason


def pytest_itemcollected(item: pytest.Item) -> None:
    """Carry an item's target and claim to the process that counts."""
    for mark in item.iter_markers(MARK):
        item.user_properties.append((MARK, mark.args[0]))
    for mark in item.iter_markers(CLAIM):
        item.user_properties.append((CLAIM, [*mark.args, item.nodeid.split("[")[0]]))


@pytest.hookimpl(hookwrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> object:
    """One line a target."""
    yield
    totals = count(terminalreporter)
    if not totals and not config.stash[NOT_RUN]:
        return
    terminalreporter.section("kvpool conformance")
    for target, found in sorted(totals.items()):
        terminalreporter.write_line(
            f"{target}: {found['passed']} passed, {found['failed']} failed, {found['skipped']} not offered"
        )
    for target, reason in config.stash[NOT_RUN].items():
        terminalreporter.write_line(f"{target}: not run ({reason})")
    claims = claim_results(terminalreporter)
    targets = sorted({target for claim in claims.values() for target in claim["results"]})
    if claims and len(targets) > 1:
        held = sum(all(claim["results"].get(t) == "passed" for t in targets) for claim in claims.values())
        terminalreporter.write_line(f"claims equal on {' and '.join(targets)}: {held} of {len(claims)}")
    if path := config.getoption("--kvpool-report"):
        report = {"targets": totals, "not_run": config.stash[NOT_RUN], "claims": claims}
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def count(reporter: pytest.TerminalReporter) -> dict[str, Counter[str]]:
    """Outcomes by target."""
    totals: dict[str, Counter[str]] = {}
    for outcome, reports in reporter.stats.items():
        for report in reports:
            target = dict(getattr(report, "user_properties", ())).get(MARK)
            if target is not None and (getattr(report, "when", "call") == "call" or outcome != "passed"):
                kind = {"error": "failed"}.get(outcome, outcome)
                totals.setdefault(str(target), Counter())[kind] += 1
    return totals


def claim_results(reporter: pytest.TerminalReporter) -> dict[str, dict[str, Any]]:
    """By claim: its text, its test, and the outcome on each target."""
    claims: dict[str, dict[str, Any]] = {}
    for outcome, reports in reporter.stats.items():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if CLAIM in properties and MARK in properties:
                name, text, test = properties[CLAIM]
                claim = claims.setdefault(name, {"text": text, "test": test, "results": {}})
                claim["results"][properties[MARK]] = outcome
    return claims


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A requested target of which no test ran is a failure, not a success."""
    if hasattr(session.config, "workerinput") or session.config.option.collectonly or exitstatus:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    totals = count(reporter)
    for target in session.config.getoption("--kvpool-target"):
        found = totals.get(target, Counter())
        if not found["passed"] + found["failed"]:
            reporter.write_line(f"kvpool: no conformance test of target {target!r} ran", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
