"""The documentation's page of layouts, as text."""

from __future__ import annotations

from kvpool_simulator.layouts.numbers import NUMBERS
from kvpool_simulator.layouts.picture import dtype_name, svg
from kvpool_simulator.layouts.rows import ROWS, Row, runs

_HEAD = """\
# Cache layouts

<!-- Written by `python -m kvpool_simulator.layouts docs`; a test compares. -->

Every layout that vLLM-Ascend registers, as the simulator allocates it: one layer at real size, 128 tokens a block,
bf16 unless said. NB is the number of blocks in a tensor. *Bytes* are those of one block of the layer, *buffers* the
runs of memory that they are. *Since* is the first release of vLLM-Ascend in whose wheel the code that makes the
layout was found, looking from 0.11.0 to 0.26.0rc1; — means in none of them (the rules of allocation allow it).

Each row's cases are golden vectors (`tests/conformance/vectors.json`) and go round, byte for byte, on the simulator
and on real Mooncake: `nox -s conformance`. None has run on an NPU ([the runbook](npu.md)).

What holds for all of them:

- An object is one block: the pages of its components one after the other, without holes. A component has its own
  element size, page size and block stride; nothing is concluded from a model's name.
- Only whole blocks are moved, so the order of bytes inside a page does not matter to a copy. It matters to who may
  share: the order is part of the fingerprint, so deployments in ND and NZ order miss each other's objects.
- Holes, spare blocks behind the manager's and neighbours are neither read nor written.
- A layer that registers another's tensors a second time, and a view that covers others, are moved once.
- What is none of these is refused at start, in words ([Troubleshooting](troubleshooting.md#a-layout-is-refused)).
"""

_SUMMARY = """
## All of them

| layout | cache entry | bytes | buffers | since |
|---|---|--:|--:|---|
"""

_MODELS = """
## Models

Bytes a block at 128 tokens, bf16 unless said.

| model | a component | a layer | all layers | buffers | with MTP | buffers |
|---|---|--:|--:|--:|--:|--:|
"""


def files() -> dict[str, str]:
    """By name in the documentation's directory, the page and its pictures."""
    pictures = {f"layouts/{row.name}.svg": svg(row) for row in ROWS}
    return {"layouts.md": _page(), **pictures}


def _page() -> str:
    summary = "".join(
        f"| [{row.title}](#{row.name}) | {row.entry} | {row.block_bytes:,} | {row.num_buffers} | {row.since} |\n"
        for row in ROWS
    )
    return "".join([_HEAD, _SUMMARY, summary, _MODELS, _models(), *map(_section, ROWS)])


def _models() -> str:
    lines = []
    for number in NUMBERS:
        spec, sizes = number.spec(), number.components
        with_mtp = number.spec(mtp=True) if number.has_mtp else None
        mtp = (f"{with_mtp.block_bytes:,}", str(with_mtp.num_buffers)) if with_mtp else ("", "")
        cells = (
            number.title,
            " + ".join(f"{size:,}" for size in sizes),
            f"{sum(sizes):,}",
            f"{spec.block_bytes:,}",
            str(spec.num_buffers),
            *mtp,
        )
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _section(row: Row) -> str:
    rows = "".join(
        f"| `{view.layer_name}` | {groups[view.layer_name]} | `{view.component.name}` | {dtype_name(view.component)} | "
        f"[{', '.join([pages, *map(str, view.component.shape)])}] | {view.component.order.value} | "
        f"{'—' if view.alias else f'{view.component.kernel_bytes * region.kernel_blocks:,}'} | "
        f"{0 if view.alias else runs(region, view)} | {region.page_stride:,} | {view.page_offset:,} |\n"
        for groups in [{entry.layer_name: entry.group for entry in row.spec.entries}]
        for region, view in row.views
        for pages in ["NB" if region.kernel_blocks == 1 else f"{region.kernel_blocks}·NB"]
    )
    note = f"\n{row.note}\n" if row.note else ""
    cases = ", ".join(f"`{case}`" for case in row.cases)
    return (
        f'\n<a id="{row.name}"></a>\n\n## {row.title}\n\n'
        f"Since {row.since}. Entry: {row.entry}. Cases: {cases}.\n{note}\n"
        f"![One page: {row.title}](layouts/{row.name}.svg)\n\n"
        "| layer | group | component | dtype | shape | order | bytes a block | buffers | page stride | offset |\n"
        "|---|--:|---|---|---|---|--:|--:|--:|--:|\n"
        f"{rows}"
    )
