"""Run by a clean environment's python: every module of an installed package imports with what it declares alone."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

HOSTS = ("torch", "vllm", "mooncake", "torch_npu")
EDGES = {"kvpool_connector.vllm", "kvpool_connector.ascend"}
"""Modules that need their host to be imported."""
EXTRA = "kvpool_connector.cli."
"""Modules that need an extra; the package itself says so."""


def main(name: str) -> None:
    """Import all of `kvpool_<name>`."""
    package = importlib.import_module(f"kvpool_{name}")
    modules = [module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
    for module in modules:
        if module not in EDGES and not module.startswith(EXTRA):
            importlib.import_module(module)
    if name == "connector":
        present = [host for host in HOSTS if importlib.util.find_spec(host)]
        assert not present, f"the clean environment has {present}: it proves nothing about the connector's core"
    print(f"kvpool_{name} {package.__version__}: {len(modules)} modules import")


if __name__ == "__main__":
    main(sys.argv[1])
