"""Which hook speaks for which bytes, with an indexer in an entry of its own: right, and with one mistake each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from clocks import ManualClock
from session_stores import SessionDictStore
from test_worker import group

from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.descriptor import ModelIdentity
from kvpool_connector.contract.topology import Rank, Topology
from kvpool_connector.host import HostDevice
from kvpool_connector.layer_loader import LayerLoad, LayerLoader
from kvpool_connector.layer_plan import LayerPlan
from kvpool_connector.layer_saver import LayerSaver
from kvpool_connector.metadata import GroupBlocks, LoadJob, SaveJob, StepMetadata
from kvpool_connector.registration import GroupSpec
from kvpool_connector.worker import PoolWorker

NUM_BLOCKS, TOKENS = 8, 16
ATTENTION = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
MTP = "mtp.layers.0.self_attn.attn"
HOOKS = [*ATTENTION, MTP]
INDEXERS = [name.replace(".attn", ".indexer.k_cache") for name in HOOKS]
SIZES = {"latent": 32, "rope": 8, "indexer": 16, "scale": 1}
CONTENTS = {1: 11, 5: 15}
MOVED = {6: 15, 3: 11}


class SplitRig:
    """Latent and rope in one entry, a quantised indexer and its scales in another: two components of two entries each.

    The indexers are in the attention's group, or in one of their own.
    """

    def __init__(self, own_group: bool, **settings: object) -> None:
        self.store = SessionDictStore()
        options = {
            "staging_bytes": 3 << 20,
            "use_layerwise": True,
            "layerwise_layers_per_transfer": 1,
            "load_timeout_s": 30,
            **settings,
        }
        self.worker = PoolWorker(
            PoolSettings.model_validate(options),
            self.store,
            HostDevice(),
            Topology(1),
            Rank(),
            ModelIdentity("tiny"),
            ManualClock(),
        )
        self.caches: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, indexer in zip(HOOKS, INDEXERS, strict=True):
            self.caches[name] = self._tensors("latent", "rope")
            self.caches[indexer] = self._tensors("indexer", "scale")
        names = [tuple(HOOKS), tuple(INDEXERS)] if own_group else [tuple(self.caches)]
        self.worker.register(self.caches, [GroupSpec(some, TOKENS, NUM_BLOCKS, kind="latent") for some in names])
        self.num_groups = len(names)

    @staticmethod
    def _tensors(*names: str) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(NUM_BLOCKS, TOKENS, 1, SIZES[name], dtype=torch.float16) for name in names)

    def fill(self, block_id: int, content: int, *, names: list[str] | None = None) -> None:
        """Of every entry, or of these, the block gets the content's bytes."""
        for name in names or self.caches:
            for tensor, page in zip(self.caches[name], self.pages(name, content), strict=True):
                tensor[block_id] = page

    def pages(self, name: str, content: int) -> list[torch.Tensor]:
        """What an entry's components hold of a content."""
        generator = torch.Generator().manual_seed(1000 * content + list(self.caches).index(name))
        return [torch.randn(tensor[0].shape, generator=generator).to(tensor.dtype) for tensor in self.caches[name]]

    def right(self, name: str, contents: dict[int, int]) -> bool:
        """Whether every component of an entry holds the contents' bytes."""
        return all(
            torch.equal(tensor[block_id], page)
            for block_id, content in contents.items()
            for tensor, page in zip(self.caches[name], self.pages(name, content), strict=True)
        )

    def blocks(self, contents: dict[int, int]) -> tuple[GroupBlocks, ...]:
        one = group(contents)
        return tuple(GroupBlocks(i, one.block_ids, one.block_hashes) for i in range(self.num_groups))

    def begin_save(self, contents: dict[int, int]) -> StepMetadata:
        step = StepMetadata(saves=(SaveJob("r", self.blocks(contents)),))
        self.worker.begin_step(step)
        return step

    def begin_load(self, contents: dict[int, int]) -> StepMetadata:
        step = StepMetadata(loads=(LoadJob("r", self.blocks(contents)),))
        self.worker.begin_step(step)
        self.worker.start_loads(step)
        return step

    def save(self, contents: dict[int, int], hooks: list[str] = HOOKS) -> None:
        """A step in which each layer is written in front of its hook, an indexer anywhere in its layer: at its end."""
        step = self.begin_save(contents)
        for hook in hooks:
            for block_id, content in contents.items():
                self.fill(block_id, content, names=[hook])
            self.worker.save_layer(hook)
            for block_id, content in contents.items():
                self.fill(block_id, content, names=[INDEXERS[HOOKS.index(hook)]])
        self.worker.end_step(step)
        assert self.worker.drain(30)

    def load(self, contents: dict[int, int], hooks: list[str] = HOOKS) -> set[int]:
        """A step that looks at each layer when it computes it: the indexer in front of the attention's wait."""
        step = self.begin_load(contents)
        seen = []
        for hook in hooks:
            indexer = INDEXERS[HOOKS.index(hook)]
            seen.append((indexer, self.right(indexer, contents)))
            self.worker.wait_layer(hook)
            seen.append((hook, self.right(hook, contents)))
        self.worker.end_step(step)
        failed = self.worker.take_failed_blocks()
        early = [name for name, right in seen if not right]
        assert failed or not early, f"computed before all of it had landed: {early}"
        return failed

    def num_objects(self) -> int:
        return sum(not key.endswith("descriptor") for key in self.store.objects)


@contextmanager
def split_rig(own_group: bool, **settings: object) -> Iterator[SplitRig]:
    made = SplitRig(own_group, **settings)
    try:
        yield made
    finally:
        for gate in made.store.range_gates.values():
            gate.set()
        made.worker.close()
        assert not made.store.open_puts, "put sessions stayed open"
        assert not made.store.open_gets, "get sessions stayed open"


def check_saves(own_group: bool) -> None:
    """What is stored is what the step has written, the indexers too, which are written after their layer's hook."""
    with split_rig(own_group) as one:
        one.save(CONTENTS)
        assert one.num_objects() == 2 * one.num_groups
        assert not one.load(MOVED)
        for name in one.caches:
            assert one.right(name, MOVED), name


def check_all_components(own_group: bool) -> None:
    """Whichever range is held up, the layers that need it stand until it is there, and no layer in front of them."""
    with split_rig(own_group) as one:
        one.save(CONTENTS)
        plan = one.worker._layer_plan
        assert plan is not None
        for shard, pieces in enumerate(plan.ranges):
            for piece in pieces:
                for name in one.caches.values():
                    for tensor in name:
                        tensor.zero_()
                gate = threading.Event()
                # Groups of equal offsets share a gate: all of them are late, which is as good.
                one.store.range_gates = {piece.offset: gate}
                timer = threading.Timer(0.05, gate.set)
                timer.start()
                assert not one.load(MOVED), (shard, piece.index)
                timer.join()


def check_missing_save_hooks(own_group: bool) -> None:
    """A layer that was not announced, or twice, is not stored; MTP may be computed several times."""
    with split_rig(own_group) as one:
        # What lies in the blocks are other bytes, which a layer without its hook would have left there.
        for hooks in (HOOKS[1:], [HOOKS[0], MTP], [HOOKS[0], *HOOKS], []):
            step = one.begin_save(CONTENTS)
            for hook in hooks:
                one.worker.save_layer(hook)
            one.worker.end_step(step)
            assert one.worker.drain(30)
            assert one.num_objects() == 0, hooks
        one.save(CONTENTS, [*HOOKS, MTP, MTP])
        assert one.num_objects() == 2 * one.num_groups


def check_missing_wait_hooks(own_group: bool) -> None:
    """A layer that did not wait, or twice, fails the load; MTP may be computed several times."""
    with split_rig(own_group) as one:
        one.save(CONTENTS)
        for hooks in (HOOKS[1:], [HOOKS[0], MTP], HOOKS[:2], [HOOKS[0], *HOOKS], []):
            step = one.begin_load(MOVED)
            for hook in hooks:
                one.worker.wait_layer(hook)
            one.worker.end_step(step)
            assert one.worker.take_failed_blocks() == set(MOVED), hooks
        assert not one.load(MOVED, [*HOOKS, MTP, MTP])


CHECKS = (check_saves, check_all_components, check_missing_save_hooks, check_missing_wait_hooks)


@pytest.mark.parametrize("own_group", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a3_a29_hooks(check: Callable[[bool], None], own_group: bool) -> None:
    check(own_group)


def test_a29_a_wait_hook_that_fires_twice_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with split_rig(False) as one:
        one.save(CONTENTS)
        for _ in range(3):
            assert one.load(MOVED, [HOOKS[0], *HOOKS]) == set(MOVED)
        assert one.worker.counters.totals()["load_hook_faults"] == 3
    (line,) = [record.getMessage() for record in caplog.records if "event=load_hook" in record.message]
    assert f"layer={HOOKS[0]} calls=2 expected=1" in line


right_needed = LayerPlan._needed
right_due = LayerPlan._due


def without_indexers(self: LayerPlan) -> Any:
    """Layers wait for their own range alone, when it is their turn."""
    return {hook: {(s, i) for s, i in places if hook and self.ranges[s][i].layout.layers[0].layer_names[0] == hook}
            for hook, places in right_needed(self).items()}  # fmt: skip


MISTAKES: dict[str, tuple[type, str, Any, Callable[[bool], None]]] = {
    "a layer does not wait for its indexer": (LayerPlan, "_needed", without_indexers, check_all_components),
    "waiting returns at once": (LayerLoad, "wait", lambda self, places, timeout_s: True, check_all_components),
    "nothing is waited for": (LayerLoader, "_wait", lambda self, load, hook: None, check_all_components),
    "save hooks are not counted": (LayerSaver, "_fault", lambda self, save, shard: "", check_missing_save_hooks),
    "wait hooks are not counted": (LayerLoader, "_fail_unwaited", lambda self, load: None, check_missing_wait_hooks),
    "an indexer is saved with its layer's hook": (
        LayerPlan,
        "_neighbours",
        lambda self, layouts: (right_neighbours(self, layouts)[0], self._hook_of_label),
        check_saves,
    ),
}  # fmt: skip
right_neighbours = LayerPlan._neighbours


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistake_is_found(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    owner, name, wrong, check = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, wrong)
    found = 0
    for own_group in (False, True):
        try:
            check(own_group)
        except AssertionError:
            found += 1
    assert found


def test_two_ranges_are_in_flight() -> None:
    """One is copied to the cache while the next is on the wire; not one at a time, nor all at once."""
    with split_rig(False) as one:
        one.save(CONTENTS)
        offsets = [piece.offset for piece in one.worker._layer_plan.ranges[0]]  # type: ignore[union-attr]
        gates = {offset: threading.Event() for offset in offsets}
        one.store.range_gates = gates
        one.store.asked.clear()
        starting = threading.Thread(target=one.load, args=(MOVED,))
        starting.start()
        for _ in range(10_000):
            if len(one.store.asked) == 2:
                break
            threading.Event().wait(0.001)
        assert one.store.asked == [("get", offset) for offset in offsets[:2]]
        for gate in gates.values():
            gate.set()
        starting.join(30)
        assert len(one.store.asked) == 3
