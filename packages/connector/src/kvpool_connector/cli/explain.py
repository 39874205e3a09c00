"""`explain`: which blocks of a prompt are in the pool, under which keys, and why the hit ends where it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool_connector.cli.deployment import Deployment, deployments
from kvpool_connector.cli.hashes import block_hashes
from kvpool_connector.cli.inventory import read_descriptors, share_in_words, take_inventory
from kvpool_connector.cli.output import Answer, CommandError, Exit, Rows
from kvpool_connector.cli.session import Session
from kvpool_connector.contract.descriptor import Descriptor
from kvpool_connector.contract.keys import tag_of


@dataclass(frozen=True)
class Question:
    """A prompt and how the engine hashes it."""

    token_ids: Sequence[int]
    namespace: str
    seed: str
    algorithm: str = "sha256"
    lora: str = ""
    salt: str = ""
    hash_block_size: int = 0
    """Tokens a hash; 0: the smallest block of the deployment."""


@dataclass
class _Block:
    group: int
    index: int
    missing: list[str]
    keys: list[tuple[str, bool, str]]
    """Key, there or not, which part of the block."""


def explain(session: Session, question: Question, *, all_blocks: bool = False) -> Answer:
    """One answer for each deployment that the namespace's descriptors stand for. Grants no leases, loads nothing."""
    if question.lora:
        raise CommandError(
            "prompts of adapters cannot be explained yet: vLLM's hash holds the adapter's path, which differs by host"
        )
    endpoint = session.master_endpoint()
    present = set(endpoint.keys())
    shards = take_inventory(present).of(question.namespace)
    if not shards:
        raise CommandError(
            f"the pool holds nothing of namespace {question.namespace!r}: no engine has announced itself in it. Is it "
            "the engine's namespace setting, and the engine's master?"
        )
    with session.store() as store:
        read_descriptors(store, endpoint, shards)
    found = deployments(shards)
    if not found:
        raise CommandError(
            f"namespace {question.namespace!r} has {len(shards)} fingerprints and no readable descriptor "
            f"({shards[0].trouble}), so nobody can say which keys a prompt has; restart an engine to write it again"
        )
    answers = [_explain(deployment, question, present, all_blocks=all_blocks) for deployment in found]
    whole = any(answer.exit is Exit.WELL for answer in answers)
    return Answer(
        {"deployments": [answer.data for answer in answers]},
        [table for answer in answers for table in answer.tables],
        [line for answer in answers for line in answer.lines],
        Exit.WELL if whole else Exit.LOOK,
    )


def _explain(deployment: Deployment, question: Question, present: set[str], *, all_blocks: bool) -> Answer:
    descriptors = [o.descriptor for o in deployment.shards if o.descriptor is not None]
    spans = {d.group: d.block_size * d.context.size for d in descriptors}
    unit = question.hash_block_size or min(spans.values())
    if any(span % unit for span in spans.values()):
        raise CommandError(f"--hash-block-size {unit} does not divide the blocks of {sorted(spans.values())} tokens")
    hashes = block_hashes(question.token_ids, unit, question.seed, question.algorithm, question.salt)
    tag = tag_of(question.lora or None, question.salt or None)
    blocks = [
        _look(deployment, group, index, hashes[(index + 1) * span // unit - 1], tag, present)
        for group, span in sorted(spans.items())
        for index in range(len(hashes) * unit // span)
    ]
    absent = deployment.missing()
    num_tokens = len(question.token_ids)
    step = math.lcm(*spans.values())
    most = (num_tokens - 1) // step * step if num_tokens else 0
    hit = 0 if absent else _hit(blocks, spans, step, most)
    model = deployment.shape.model
    title = f"{model.name} in {deployment.shape.namespace!r}, epoch {deployment.shape.epoch}"
    why = _why(hit, most, num_tokens, step, blocks, spans, absent)
    rows = Rows(title, ("group", "block", "tokens", "there", "missing part"))
    for block in blocks:
        if all_blocks or block.missing:
            span = spans[block.group]
            tokens = f"{block.index * span}..{(block.index + 1) * span - 1}"
            num_there = f"{len(block.keys) - len(block.missing)} of {len(block.keys)}"
            rows.rows.append((block.group, block.index, tokens, num_there, "; ".join(block.missing)))
    del rows.rows[200:]
    return Answer(
        {
            "model": vars(model),
            "num_tokens": num_tokens,
            "hit_tokens": hit,
            "most_tokens": most,
            "why": why,
            "never_announced": absent,
            "blocks": [
                {
                    "group": block.group,
                    "index": block.index,
                    "keys": [{"key": key, "there": there, "part": part} for key, there, part in block.keys],
                }
                for block in blocks
            ],
        },
        [rows] if rows.rows else [],
        [f"{title}: {hit} of {num_tokens} tokens would be hit. {why}"],
        Exit.WELL if hit == most and most else Exit.LOOK,
    )


def _look(deployment: Deployment, group: int, index: int, block_hash: bytes, tag: str, present: set[str]) -> _Block:
    block = _Block(group, index, [], [])
    for objects in deployment.shards:
        descriptor: Descriptor | None = objects.descriptor
        if descriptor is not None and descriptor.group == group:
            key = objects.shard.key(block_hash, tag)
            part = share_in_words(descriptor)
            block.keys.append((key, key in present, part))
            if key not in present:
                block.missing.append(part)
    return block


def _hit(blocks: Sequence[_Block], spans: dict[int, int], step: int, most: int) -> int:
    """Tokens up to which every block of every group is there. Windows are not known here, so all blocks are asked."""
    ends = [block.index * spans[block.group] for block in blocks if block.missing]
    return min([most, *(end // step * step for end in ends)])


def _why(
    hit: int, most: int, num_tokens: int, step: int, blocks: Sequence[_Block], spans: dict[int, int], absent: list[str]
) -> str:
    if absent:
        return f"Part of every block was never announced by any rank: {'; '.join(absent[:4])}. Did all workers start?"
    if num_tokens <= step:
        return f"Only whole blocks of {step} tokens are kept and one token is always computed, so this prompt has none"
    if hit == most:
        return f"That is all that can be hit: whole blocks of {step} tokens, and at least one token is computed"
    first = next(b for b in sorted(blocks, key=lambda b: b.index * spans[b.group]) if b.missing)
    if len(first.missing) < len(first.keys):
        return (
            f"Block {first.index} of group {first.group} is there in part; missing: {'; '.join(first.missing[:4])}. "
            "It was evicted, or that rank did not save it"
        )
    if not any(there for block in blocks for _, there, _ in block.keys):
        return (
            "No block of the prompt is there: never saved, evicted, another prompt from its first token on, or another "
            "hash (PYTHONHASHSEED and --prefix-caching-hash-algo must be the engine's)"
        )
    return f"Block {first.index} of group {first.group} is not there: not saved yet, or evicted"
