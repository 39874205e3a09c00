"""What a run found: by target, by capability and layout, by claim, and what the suite's own teeth caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

TARGET, CAPABILITY, CLAIM, TEETH = "kvpool_conformance", "kvpool_capability", "claim", "kvpool_teeth"
"""Markers, and the names under which an item carries them to the process that counts."""
KINDS = {"error": "failed", "xpassed": "failed", "xfailed": "deviating"}
WORDS = {"passed": "passed", "failed": "failed", "deviating": "deviating", "skipped": "not offered"}


@dataclass
class Results:
    """Outcomes, counted."""

    targets: dict[str, Counter[str]] = field(default_factory=dict)
    capabilities: dict[str, dict[str, Counter[str]]] = field(default_factory=dict)
    """By capability or layout, by target."""
    claims: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By claim: its text, its test, and the outcome on each target."""
    teeth: dict[str, Counter[str]] = field(default_factory=dict)
    """By kind of planted mistake."""

    @classmethod
    def of(cls, stats: dict[str, list[Any]]) -> Results:
        """What a terminal reporter's `stats` hold."""
        results = cls()
        for outcome, reports in stats.items():
            for report in reports:
                kind = KINDS.get(outcome, outcome)
                if kind in WORDS:
                    results._add(kind, outcome, dict(getattr(report, "user_properties", ())))
        return results

    def _add(self, kind: str, outcome: str, properties: dict[str, Any]) -> None:
        if teeth := properties.get(TEETH):
            self.teeth.setdefault(teeth, Counter())[kind] += 1
        target = properties.get(TARGET)
        if target is None:
            return
        self.targets.setdefault(target, Counter())[kind] += 1
        if capability := properties.get(CAPABILITY):
            self.capabilities.setdefault(capability, {}).setdefault(target, Counter())[kind] += 1
        if CLAIM in properties:
            name, text, test = properties[CLAIM]
            claim = self.claims.setdefault(name, {"text": text, "test": test, "results": {}})
            claim["results"][target] = outcome

    def lines(self) -> Iterator[str]:
        """For people: targets, capabilities, claims, teeth."""
        if self.capabilities:
            yield from self._table(sorted(self.targets))
            yield ""
        for target, found in sorted(self.targets.items()):
            words = [f"{found[kind]} {word}" for kind, word in WORDS.items() if found[kind] or kind != "deviating"]
            yield f"{target}: {', '.join(words)}"
        targets = sorted({target for claim in self.claims.values() for target in claim["results"]})
        if len(targets) > 1:
            held = sum(all(claim["results"].get(t) == "passed" for t in targets) for claim in self.claims.values())
            yield f"claims equal on {' and '.join(targets)}: {held} of {len(self.claims)}"
        for kind, found in sorted(self.teeth.items()):
            yield f"{kind} caught: {found['passed']} of {found.total()}"

    def _table(self, targets: Iterable[str]) -> Iterator[str]:
        rows = [["capability or layout", *targets]]
        for capability, found in sorted(self.capabilities.items()):
            rows.append([capability, *(in_words(found.get(target, Counter())) for target in targets)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "targets": self.targets,
            "capabilities": self.capabilities,
            "claims": self.claims,
            "teeth": self.teeth,
        }


def in_words(found: Counter[str]) -> str:
    """A cell of the table."""
    return ", ".join(f"{found[kind]} {word}" for kind, word in WORDS.items() if found[kind]) or "not run"
