"""`explain --request-id`: what an engine on this machine decided about a request that it has had."""

from __future__ import annotations

from datetime import datetime

import msgspec

from kvpool_connector.cli.output import Answer, CommandError, Exit, Rows
from kvpool_connector.history import Decision, ask_engines


def explain_request(request_id: str) -> Answer:
    """What the engines of this user on this machine remember of the request."""
    try:
        num_engines, decisions = ask_engines(request_id)
    except OSError as error:
        raise CommandError(f"the engines' sockets cannot be read: {error}") from error
    if not num_engines:
        raise CommandError(
            "no engine of this user answers on this machine. Run this where the engine's scheduler runs, as its user "
            "and with its TMPDIR; remember_requests = 0 in kv_connector_extra_config turns it off"
        )
    if not decisions:
        raise CommandError(
            f"{num_engines} engines answer and none remembers {request_id!r}: an engine keeps the last "
            "remember_requests that it looked up, under the engine's own ids (which begin with the server's, such as "
            "cmpl-… or chatcmpl-…)"
        )
    rows = Rows("requests", ("request", "time", "tokens", "engine's cache", "hit", "loaded", "result"))
    for d in decisions:
        time = datetime.fromtimestamp(d.time_s).isoformat(" ", "seconds")
        hit = d.hit_tokens - d.engine_tokens
        rows.rows.append((d.request_id, time, d.num_tokens, d.engine_tokens, hit, d.loaded_tokens, d.result))
    whole = all(d.hit_tokens >= d.most_tokens and not d.load_failed for d in decisions)
    return Answer(
        {"engines": num_engines, "requests": [{**msgspec.to_builtins(d), "why": why(d)} for d in decisions]},
        [rows],
        [f"{d.request_id}: {why(d)}" for d in decisions],
        Exit.WELL if whole else Exit.LOOK,
    )


def why(decision: Decision) -> str:
    """One sentence: why so much was loaded and not more."""
    d = decision
    if d.load_failed:
        return f"{d.loaded_tokens} tokens were hit and did not load, so they were computed; the engine's log says more"
    if d.result == "short":
        return "The engine's own cache left no whole block to ask for, so the pool was not asked"
    if d.result == "below":
        found = d.hit_tokens - d.engine_tokens
        had = f"The pool had {found} tokens" if found else f"At most {d.most_tokens - d.engine_tokens} were to be had"
        return f"{had}: fewer than the {d.least_tokens} from which on loading is chosen (min_tokens_to_load)"
    if d.result == "unanswered":
        return "The store was down or did not answer in time, so nothing was loaded; see event=store_outage in the log"
    if d.hit_tokens >= d.most_tokens:
        return f"All of the {d.most_tokens} tokens that whole blocks can hold were there"
    block = f"Block {d.block} of group {d.group}"
    if len(d.missing_keys) < d.block_keys:
        share = f"{len(d.missing_keys)} of its {d.block_keys} parts"
        return f"{block} was there in part; {share} were not: {', '.join(d.missing_keys[:4])}"
    return f"{block} was not there: never saved, not yet, or evicted; key {d.missing_keys[0]}"
