"""The Grafana dashboard asks for metrics, labels and results that the connector exports, and shows every metric."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool_connector.stats import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD: dict[str, Any] = json.loads((DOCS / "kvpool-dashboard.json").read_text(encoding="utf-8"))
EXPORTED = {f"vllm:{family.name}_total": set(family.counts.values()) for family in FAMILIES}
SELECTOR = re.compile(r"(vllm:\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
VLLM_LABELS = {"model_name", "engine"}
"""Labels that vLLM gives every metric, beside those of the scrape."""
WIDTH = 24


def faults(dashboard: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a dashboard, in words."""
    asked: set[str] = set()
    places: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        title = panel["title"]
        if not panel["description"]:
            yield f"{title}: nothing says how to read it"
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        if places & cells or at["x"] + at["w"] > WIDTH:
            yield f"{title}: lies on another panel, or outside"
        places |= cells
        for target in panel["targets"]:
            text = target["expr"]
            if not SELECTOR.search(text) or text.count("(") != text.count(")"):
                yield f"{title}: {text!r} asks for nothing"
            for name, matchers in SELECTOR.findall(text):
                asked.add(name)
                yield from (f"{title}: {fault}" for fault in _selector_faults(name, matchers))
    for variable in dashboard["templating"]["list"]:
        for name in re.findall(r"vllm:\w+", json.dumps(variable)):
            if name not in EXPORTED:
                yield f"variable {variable['name']}: {name} is not exported"
    yield from (f"{name} is in no panel" for name in sorted(EXPORTED.keys() - asked))


def _selector_faults(name: str, matchers: str) -> Iterator[str]:
    if name not in EXPORTED:
        yield f"{name} is not exported"
        return
    found = MATCHER.findall(matchers)
    if ",".join(f'{label}{sign}"{value}"' for label, sign, value in found) != matchers:
        yield f"{matchers!r} cannot be read"
    for label, sign, value in found:
        if label == "result":
            wanted = set(value.split("|")) if "~" in sign else {value}
            if not wanted <= EXPORTED[name]:
                yield f"{name} has no result {sorted(wanted - EXPORTED[name])}"
        elif label not in VLLM_LABELS:
            yield f"{name} has no label {label!r}"


def test_the_dashboard_asks_for_what_is_exported() -> None:
    assert list(faults(DASHBOARD)) == []


def change(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A dashboard in which all texts differ in that way."""

    def changed(dashboard: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(dashboard)
        assert old in text
        return json.loads(text.replace(old, new))  # type: ignore[no-any-return]

    return changed


def without_a_panel(dashboard: dict[str, Any]) -> dict[str, Any]:
    """The one that alone shows hook faults is gone."""
    changed = copy.deepcopy(dashboard)
    changed["panels"] = [p for p in changed["panels"] if "kvpool_hook_faults" not in json.dumps(p)]
    return changed


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (change("kvpool_tokens_total", "kvpool_tokens"), "vllm:kvpool_tokens is not exported"),
        (change('result=\\"pool\\"', 'result=\\"the pool\\"'), "has no result ['the pool']"),
        (change("stored|present", "stored|there"), "has no result ['there']"),
        (change("model_name=~", "model=~"), "has no label 'model'"),
        (change("sum(rate", "sum((rate"), "asks for nothing"),
        (change('"x": 8', '"x": 7'), "lies on another panel"),
        (without_a_panel, "vllm:kvpool_hook_faults_total is in no panel"),
    ],
)
def test_a_mistake_is_found(mistake: Callable[[dict[str, Any]], dict[str, Any]], said: str) -> None:
    assert any(said in fault for fault in faults(mistake(DASHBOARD)))
