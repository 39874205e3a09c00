"""The plugin counts, reports, and is never green for nothing."""

from __future__ import annotations

import json

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest

def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = metafunc.config.getoption("--kvpool-target")
        marked = [pytest.param(name, marks=pytest.mark.kvpool_conformance(name)) for name in names]
        metafunc.parametrize("backend", marked)

@pytest.mark.kvpool_capability("objects")
class TestSuite:
    def test_right(self, backend):
        pass

    @pytest.mark.kvpool_capability("leases")
    def test_half(self, backend):
        if backend == "bad":
            pytest.fail("no lease")

    @pytest.mark.kvpool_capability("leases")
    def test_absent(self, backend):
        pytest.skip("not offered: time")

    @pytest.mark.parametrize("layout", ["mla", "gqa"])
    def test_layout(self, backend, layout):
        pass

    @pytest.mark.claim("c1", "a claim")
    def test_claim(self, backend):
        assert backend != "bad"

@pytest.mark.kvpool_teeth("wrong stores")
@pytest.mark.parametrize("mistake", ["one", "two"])
def test_teeth(mistake):
    pass
"""


def run(suite: pytest.Pytester, *options: str) -> pytest.RunResult:
    """A run of the suite. Without rewritten assertions, as rewriting all plugins anew takes seconds."""
    return suite.runpytest("--assert=plain", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *options)


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with a suite that any target can be named to."""
    pytester.makepyfile(test_suite=SUITE)
    return pytester


@pytest.mark.parametrize("parallel", [[], ["-n", "1"]], ids=["one-process", "parallel"])
def test_the_summary_and_the_report(suite: pytest.Pytester, parallel: list[str]) -> None:
    targets = ("--kvpool-target", "good", "--kvpool-target", "bad")
    result = run(suite, *targets, "--kvpool-report", "r.json", *parallel)
    result.assert_outcomes(passed=10, failed=2, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "capability or layout  bad                      good",
            "layout gqa            1 passed                 1 passed",
            "layout mla            1 passed                 1 passed",
            "leases                1 failed, 1 not offered  1 passed, 1 not offered",
            "objects               1 passed, 1 failed       2 passed",
            "bad: 3 passed, 2 failed, 1 not offered",
            "good: 5 passed, 0 failed, 1 not offered",
            "claims equal on bad and good: 0 of 1",
            "wrong stores caught: 2 of 2",
        ]
    )
    report = json.loads((suite.path / "r.json").read_text())
    assert report["targets"]["bad"] == {"passed": 3, "failed": 2, "skipped": 1}
    assert report["capabilities"]["leases"]["good"] == {"passed": 1, "skipped": 1}
    assert report["claims"]["c1"]["results"] == {"good": "passed", "bad": "failed"}
    assert report["teeth"] == {"wrong stores": {"passed": 2}}
    assert report["not_run"] == {}


@pytest.mark.parametrize("chosen", ["teeth", "absent"])
@pytest.mark.parametrize("parallel", [[], ["-n", "1"]], ids=["one-process", "parallel"])
def test_a_requested_target_without_a_test_fails(suite: pytest.Pytester, chosen: str, parallel: list[str]) -> None:
    result = run(suite, "--kvpool-target", "good", "-k", chosen, *parallel)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*no conformance test of target 'good' ran*"])


def test_no_test_at_all_fails(suite: pytest.Pytester) -> None:
    assert run(suite, "--kvpool-target", "good", "-k", "nothing").ret != 0


def test_what_is_not_there_is_named(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from kvpool_conformance.plugin import not_run\n"
        "def pytest_collection_finish(session):\n"
        "    not_run(session.config, 'npu', 'no device')\n"
    )
    pytester.makepyfile("def test_something(): pass")
    run(pytester).stdout.fnmatch_lines(["npu: not run (no device)"])


DEVIATIONS = "# known\n\nbad test_half leases are not counted\nbad test_claim  no claims here\n"


def test_known_deviations_are_expected(suite: pytest.Pytester) -> None:
    (suite.path / "known").write_text(DEVIATIONS)
    result = run(suite, "--kvpool-target", "bad", "--kvpool-deviations", "known")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["bad: 3 passed, 0 failed, 2 deviating, 1 not offered"])


def test_a_deviation_that_is_none_any_more_fails(suite: pytest.Pytester) -> None:
    (suite.path / "known").write_text(DEVIATIONS + "bad test_right it used to be wrong\n")
    result = run(suite, "--kvpool-target", "bad", "--kvpool-deviations", "known")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*XPASS(strict)*it used to be wrong*"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("good test_gone it was renamed", "good has no test 'test_gone': remove the entry or correct it"),
        ("good test_half", "is no deviation: expected TARGET TEST REASON"),
    ],
)
def test_a_stale_or_broken_entry_is_an_error(suite: pytest.Pytester, line: str, words: str) -> None:
    (suite.path / "known").write_text(line + "\n")
    result = run(suite, "--kvpool-target", "good", "--kvpool-deviations", "known")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])
