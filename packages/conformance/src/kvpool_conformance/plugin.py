"""The suite as a pytest plugin: which targets are judged, and what was found, target by target.

Options: `--kvpool-target NAME` (repeatable; a target that cannot be reached is an error), `--kvpool-if-there NAME`
(repeatable; a target that cannot be reached is named as not run), `--kvpool-deviations FILE` (known failures, see
`kvpool_conformance.deviations`), `--kvpool-report FILE` (JSON). It loads no Hypothesis profile; `--hypothesis-seed`
replays.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from kvpool_conformance import deviations
from kvpool_conformance.results import CAPABILITY, CLAIM, TARGET, TEETH, Results

MARK = TARGET
NOT_RUN = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """See the module."""
    group = parser.getgroup("kvpool")
    group.addoption("--kvpool-target", action="append", default=[], metavar="NAME", help="a target to judge")
    group.addoption("--kvpool-if-there", action="append", default=[], metavar="NAME", help="the same, if it is there")
    group.addoption("--kvpool-deviations", default=None, metavar="FILE", help="known failures, strictly")
    group.addoption("--kvpool-report", default=None, metavar="FILE", help="write the result as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Markers and places for results."""
    config.addinivalue_line("markers", f"{TARGET}(target): a conformance test of one target")
    config.addinivalue_line("markers", f"{CAPABILITY}(name): what of a target the test is about")
    config.addinivalue_line("markers", f"{CLAIM}(id, text): a claim about a store, tested on every target")
    config.addinivalue_line("markers", f"{TEETH}(kind): a planted mistake that the suite must catch")
    config.stash[NOT_RUN] = {}


def not_run(config: pytest.Config, target: str, reason: str) -> None:
    """Note that a target was not run, and why."""
    config.stash[NOT_RUN][target] = reason


def pytest_itemcollected(item: pytest.Item) -> None:
    """Carry an item's target, capability and claim to the process that counts."""
    for name in (TARGET, CAPABILITY, TEETH):
        if mark := item.get_closest_marker(name):
            item.user_properties.append((name, mark.args[0]))
    callspec = getattr(item, "callspec", None)
    if callspec is not None and "layout" in callspec.params:
        item.user_properties.append((CAPABILITY, f"layout {callspec.params['layout']}"))
    for mark in item.iter_markers(CLAIM):
        item.user_properties.append((CLAIM, [*mark.args, item.nodeid.split("[")[0]]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Known deviations are expected to fail, strictly."""
    if path := config.getoption("--kvpool-deviations"):
        deviations.expect(Path(path), items)


@pytest.hookimpl(hookwrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> object:
    """What was found, in words and as JSON."""
    yield
    results, missing = Results.of(terminalreporter.stats), config.stash[NOT_RUN]
    if not (results.targets or results.teeth or missing):
        return
    terminalreporter.section("kvpool conformance")
    for line in results.lines():
        terminalreporter.write_line(line)
    for target, reason in missing.items():
        terminalreporter.write_line(f"{target}: not run ({reason})")
    if path := config.getoption("--kvpool-report"):
        report = {**results.as_json(), "not_run": missing}
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A requested target of which no test ran is a failure, not a success."""
    if hasattr(session.config, "workerinput") or session.config.option.collectonly or exitstatus:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    totals = Results.of(reporter.stats).targets
    for target in session.config.getoption("--kvpool-target"):
        found = totals.get(target, Counter())
        if not found.total() - found["skipped"]:
            reporter.write_line(f"kvpool: no conformance test of target {target!r} ran", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
