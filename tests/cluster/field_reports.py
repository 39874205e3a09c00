"""Faults that people met in the field, and which tests hold them: a test that holds one carries its id in its name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field-reports.md"
FAULTS: dict[str, str] = {
    "A1": "part of a sparse cache was never stored, and old memory was computed on after a hit",
    "A3": "a layer was computed before all of its components had landed",
    "A5": "a save read a block while the device was still writing it",
    "A6": "wrong bytes only under load, with blocks recycled at every step",
    "A7": "a block changed hands while its save was queued, and the new bytes were stored under the old key",
    "A9": "a key failed to load, was not reported, and its block was computed on",
    "A12": "a read outlived its lease and returned memory that was reclaimed",
    "A14": "a put that failed or was half done could be looked up",
    "A15": "the engine changed its cache's shape, and axes of equal size were mistaken for one another",
    "A17": "two formats of equal size read each other's bytes",
    "A18": "with a hit in the engine and one in the pool, loads went into the wrong blocks",
    "A20": "a longer stored prefix was taken to imply every shorter one",
    "A22": "a transfer counted as done before its last byte",
    "A25": "a load wrote into blocks that a running step was using",
    "A27": "less came back than was asked for, and the engine went on",
    "A28": "a block was saved that another connector had not finished loading",
    "A29": "a layer's hook did not fire, or fired twice, and the layer was stored all the same",
    "A30": "the indexer's cache moved into an entry of its own",
    "A34": "holes and padding between pages were copied or overwritten",
    "A35": "a load that was given up landed late, in blocks that had other owners by then",
    "A36": "the engine's way of being told of failures changed between versions",
    "B1": "a lookup asked one rank and took its answer for all",
    "B3": "adapters, salts, images or embeddings shared what they must not share",
    "B5": "an adapter and a salt of one name have one block hash",
    "B6": "deployments that differ in format shared a store and read each other's bytes",
    "B8": "ranks that hold the same heads stored them again, or others' heads",
    "B10": "after new weights the pool still served the old ones' KV",
    "B11": "nodes with different hash seeds never hit, and nobody said so",
    "B12": "keys that were looked up were not those that were put",
    "B13": "scheduler and workers were configured for different tenants",
    "C2": "the end of a request's saving was lost, or told twice, and its blocks stayed held",
    "C3": "stages of a pipeline but the last never finished their saves",
    "C5": "what was in the pool was put again",
    "C7": "what a full store had refused was never put later",
    "C8": "a client died in the middle of a put, and its key was taken for stored",
    "C9": "the store said that it had stored, and had not",
    "C10": "a store that is full and evicts nothing stopped the serving",
    "C11": "keys were listed whose values were gone",
    "C12": "objects evicted between lookup and load failed users' requests",
    "C14": "layer by layer, more was loaded than was hit, and loading counted as done too early",
    "C17": "the second turn of a chat missed the first one's answer",
    "C19": "many blocks of a long prompt in chunks were never stored",
    "C21": "the next turn asked before the last one's save was there",
    "D1": "an abort during a load leaked the request's blocks",
    "D3": "a rank waited for the store inside a step, and the others for it",
    "D4": "a connector spoke for requests that were another's",
    "D7": "hooks that are called twice counted twice",
    "D8": "a prompt that was hit whole left no token to compute",
    "D10": "blocks of the last request stayed held because no step came any more",
    "D12": "caches of unusual form were registered wrongly or crashed",
    "D15": "with the memory's owner hung, every request waited for it again",
    "D21": "ranks saw different views of the store and disagreed about a hit",
    "D23": "a slow put held the step",
    "D24": "pooling requests were looked up for ever",
    "E1": "counters went down, or counted a token twice",
    "E2": "hits counted that were never loaded, or at every step anew",
    "E3": "an error in the metrics failed a request",
    "F2": "too many small objects",
    "F4": "something of ended requests stayed behind",
    "F5": "content that ranks hold alike was stored once a rank",
    "F7": "segments of all ranks together exceeded the memory",
    "G1": "the pool was asked for what the engine had",
    "G2": "each chunk of a long prompt did the whole prompt's work again",
    "G4": "loading was slower than computing",
    "H1": "one failure filled the log",
    "H2": "nobody could say whether a block was stored, and why it missed",
    "H5": "versions that import failed later",
    "H6": "what must hold for hits was known to few",
}
_TEST = re.compile(r"def (test_(?:[a-h]\d+_)+\w*)", re.IGNORECASE)


def holders() -> dict[str, list[str]]:
    """By fault, the tests that carry its id."""
    found: dict[str, list[str]] = {fault: [] for fault in FAULTS}
    for path in sorted([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("packages/**/*.py")]):
        if ".nox" in path.parts:
            continue
        for name in _TEST.findall(path.read_text(encoding="utf-8")):
            for part in name.removeprefix("test_").split("_"):
                if part.upper() in found:
                    found[part.upper()].append(f"{path.relative_to(ROOT).as_posix()}::{name}")
                elif not re.fullmatch(r"[a-h]\d+", part):
                    break
    return found


def held_rows() -> tuple[int, int]:
    """How many faults a test holds, and how many there are."""
    found = holders()
    return sum(bool(tests) for tests in found.values()), len(found)


def page() -> str:
    """`docs/field-reports.md`."""
    held, total = held_rows()
    lines = [
        "# Faults from the field",
        "",
        "What users of KV-pool connectors met in public reports (vLLM-Ascend, vLLM, Mooncake, LMCache, SGLang, UCM),",
        "each as the fault that must not come back. A test that holds one carries its id in its name; this page is",
        "made from the tests by `python -m tests.cluster.field_reports`.",
        "",
        f"{held} of {total} are held.",
        "",
        "| id | fault | tests |",
        "|---|---|---|",
    ]
    for fault, tests in holders().items():
        shown = "<br>".join(f"`{test.split('/')[-1]}`" for test in dict.fromkeys(tests)) or "not yet"
        lines.append(f"| {fault} | {FAULTS[fault]} | {shown} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(*held_rows(), file=sys.stderr)
