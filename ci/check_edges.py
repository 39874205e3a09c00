"""What import-linter cannot say: foreign packages by file, and a contract of the standard library alone.

Run as `python ci/check_edges.py [ROOT]`; prints each violation and exits with 1 when there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

EDGES = {
    "vllm": "kvpool_connector/vllm.py",
    "vllm_ascend": "kvpool_connector/vllm.py",
    "mooncake": "kvpool_connector/mooncake.py",
    "torch_npu": "kvpool_connector/ascend.py",
}
"""The one file that may import each host."""
TORCH_FREE = "kvpool_connector"
TORCH_EDGES = ("kvpool_connector/vllm.py", "kvpool_connector/ascend.py")


def imports(source: str) -> Iterator[str]:
    """Root names of all imports in a file, also those made by `import_module` with a literal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value.split(".")[0]


def violations(root: Path) -> Iterator[str]:
    """One line for each import that crosses an edge."""
    for path in sorted(root.glob("packages/*/src/**/*.py")):
        name = path.relative_to(next(parent for parent in path.parents if parent.name == "src")).as_posix()
        for module in sorted(set(imports(path.read_text(encoding="utf-8")))):
            if module in EDGES and EDGES[module] != name:
                yield f"{name} imports {module}; only {EDGES[module]} may"
            if module == "torch" and name.startswith(TORCH_FREE) and name not in TORCH_EDGES:
                yield f"{name} imports torch; the connector's core does without"
            if "kvpool_connector/contract/" in name and module not in (*sys.stdlib_module_names, "kvpool_connector"):
                yield f"{name} imports {module}; the contract is standard library only"


def main() -> int:
    """Print violations; 1 when there are any."""
    found = list(violations(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
    print("\n".join(found) or "edges: every foreign import is in its one file")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
