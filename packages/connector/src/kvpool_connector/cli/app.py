"""The commands and their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvpool_connector.cli.bench import Case, bench
from kvpool_connector.cli.clear import clear
from kvpool_connector.cli.contents import list_objects, pool_status
from kvpool_connector.cli.doctor import Checkup, doctor
from kvpool_connector.cli.explain import Question, explain
from kvpool_connector.cli.hashes import ALGORITHMS
from kvpool_connector.cli.output import Answer, CommandError, Exit, show, show_error
from kvpool_connector.cli.progress import ProgressBar, silent
from kvpool_connector.cli.prompt import read_tokens, tokenize
from kvpool_connector.cli.request import explain_request
from kvpool_connector.cli.session import Session
from kvpool_connector.cli.shapes import MODELS
from kvpool_connector.cli.verify import verify
from kvpool_connector.config import PoolSettings
from kvpool_connector.contract.errors import KVPoolError


class Commands(TyperGroup):
    """The commands; what the parser of options refuses is answered like any other error."""

    def main(self, args: Sequence[str] | None = None, **how: Any) -> NoReturn:  # type: ignore[override]
        """Run one command and leave with its status. `args` are the words behind `kvpool`."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            status = super().main(words, **{**how, "standalone_mode": False})
        except typer.Abort:
            status = show_error(CommandError("ended before it was done"), as_json="--json" in words)
        except Exception as error:
            # Typer brings its own copy of click since 0.20; by name its errors are of neither module in all versions.
            if not hasattr(error, "format_message"):
                raise
            if not words:
                error.show()  # type: ignore[attr-defined]
                raise SystemExit(int(Exit.ERROR)) from None
            command = "kvpool " + words[0] if words[0] in self.commands else "kvpool"
            told = f"{error.format_message()} `{command} --help` lists what it takes"
            status = show_error(CommandError(told), as_json="--json" in words)
        raise SystemExit(status)


app = typer.Typer(
    name="kvpool",
    cls=Commands,
    help="What a KVPool holds, why it misses, whether it is right and set up right. Exit status: 0 all well, 1 look at "
    "the answer, 2 error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
Config = Annotated[str, typer.Option(help="mooncake.json; by default what MOONCAKE_CONFIG_PATH names.")]
Master = Annotated[str, typer.Option(help="host:port of mooncake_master; wins over the file.")]
Endpoint = Annotated[str, typer.Option(help="host:port of its HTTP endpoint; by default the master's host, port 9003.")]
Protocol = Annotated[str, typer.Option(help="Transport of this command's client; by default that of the file.")]
Namespace = Annotated[str | None, typer.Option(help="One namespace only.")]
ModelName = Annotated[str, typer.Option("--model", help=f"One of {', '.join(MODELS)}.")]


@contextmanager
def session_of(
    ctx: typer.Context, as_json: bool, config: str = "", master: str = "", endpoint: str = "", protocol: str = ""
) -> Iterator[tuple[Session, Callable[[Answer], None]]]:
    """The session of a command and the way to answer; errors end the command with status 2."""
    session = ctx.obj if isinstance(ctx.obj, Session) else Session()
    session.as_json = as_json
    session.config, session.protocol = config or session.config, protocol or session.protocol
    session.master, session.endpoint = master or session.master, endpoint or session.endpoint
    status: list[int] = []
    bar = ProgressBar()
    session.tell = bar.tell if session.tell is silent else session.tell

    def answered(answer: Answer) -> None:
        bar.close()
        status.append(show(answer, as_json=as_json))

    try:
        yield session, answered
    except (KVPoolError, CommandError) as error:
        bar.close()
        status = [show_error(error, as_json=as_json)]
    finally:
        bar.close()
    raise typer.Exit(status[-1])


@app.command("doctor")
def _doctor(
    ctx: typer.Context,
    ranks: Annotated[int, typer.Option(min=1, help="Workers of this node.")] = 1,
    model: ModelName = "deepseek-v3.2",
    blocks: Annotated[int, typer.Option(min=1, max=64, help="Blocks of the self-test.")] = 4,
    extra_config: Annotated[str, typer.Option(help="The engine's kv_connector_extra_config, as JSON.")] = "{}",
    config: Config = "",
    master: Master = "",
    endpoint: Endpoint = "",
    protocol: Protocol = "",
    as_json: Json = False,
) -> None:
    """Before serving: is everything set up so that blocks are stored, found and right?"""
    with session_of(ctx, as_json, config, master, endpoint, protocol) as (session, answer):
        try:
            values = json.loads(extra_config)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"--extra-config is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise CommandError(f"--extra-config: found {type(values).__name__}; expected a JSON object")
        if model not in MODELS:
            raise CommandError(f"--model {model!r} is not listed; expected one of {', '.join(MODELS)}")
        answer(doctor(Checkup(session, PoolSettings.from_extra_config(values), ranks, model, blocks)))


@app.command("ls")
def _ls(
    ctx: typer.Context,
    namespace: Namespace = None,
    limit: Annotated[int, typer.Option(min=0, help="Objects to show.")] = 100,
    master: Master = "",
    config: Config = "",
    endpoint: Endpoint = "",
    as_json: Json = False,
) -> None:
    """The objects of the pool and their sizes."""
    with session_of(ctx, as_json, config, master, endpoint) as (session, answer):
        answer(list_objects(session, namespace, limit))


@app.command("stat")
def _stat(
    ctx: typer.Context,
    namespace: Namespace = None,
    config: Config = "",
    master: Master = "",
    endpoint: Endpoint = "",
    protocol: Protocol = "",
    as_json: Json = False,
) -> None:
    """Namespaces, fingerprints (decoded), sizes; memory and evictions."""
    with session_of(ctx, as_json, config, master, endpoint, protocol) as (session, answer):
        answer(pool_status(session, namespace))


@app.command("verify")
def _verify(
    ctx: typer.Context,
    keys: Annotated[list[str] | None, typer.Argument(help="Keys to check.")] = None,
    namespace: Namespace = None,
    sizes_only: Annotated[bool, typer.Option("--sizes-only", help="Read no object, so lease none.")] = False,
    config: Config = "",
    master: Master = "",
    endpoint: Endpoint = "",
    protocol: Protocol = "",
    as_json: Json = False,
) -> None:
    """Objects against their descriptors (and checksums). Reading leases them for a while; nothing is changed."""
    with session_of(ctx, as_json, config, master, endpoint, protocol) as (session, answer):
        answer(verify(session, keys or [], namespace, read=not sizes_only))


def asked(question: str) -> bool:
    """Whether somebody says yes; no answer is a no."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        return False


@app.command("clear")
def _clear(
    ctx: typer.Context,
    namespace: Annotated[str, typer.Option(help="The namespace to empty.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also what is being read now.")] = False,
    leave_foreign: Annotated[bool, typer.Option("--leave-foreign", help="Go on beside foreign objects.")] = False,
    config: Config = "",
    master: Master = "",
    endpoint: Endpoint = "",
    protocol: Protocol = "",
    as_json: Json = False,
) -> None:
    """Remove all objects of one namespace, and of no other. Asks first."""
    with session_of(ctx, as_json, config, master, endpoint, protocol) as (session, answer):
        if as_json and not yes:
            raise CommandError("--json cannot ask; add --yes to remove. Nothing was removed")
        answer(
            clear(session, namespace, confirm=lambda text: yes or asked(text), force=force, leave_foreign=leave_foreign)
        )


@app.command("explain")
def _explain(
    ctx: typer.Context,
    tokens_file: Annotated[Path | None, typer.Option(help="Token ids: JSON, or separated by blanks.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Text, as the engine sees it; needs --model.")] = None,
    model: Annotated[str, typer.Option(help="Whose tokenizer to use.")] = "",
    namespace: Annotated[str, typer.Option(help="The engine's namespace.")] = "default",
    hash_seed: Annotated[str | None, typer.Option(help="The engine's PYTHONHASHSEED; by default this one's.")] = None,
    hash_algorithm: Annotated[str, typer.Option(help=f"One of {', '.join(ALGORITHMS)}.")] = "sha256",
    hash_block_size: Annotated[int, typer.Option(min=0, help="Tokens a hash; 0: the smallest block.")] = 0,
    salt: Annotated[str, typer.Option(help="The request's cache_salt.")] = "",
    request_id: Annotated[str, typer.Option(help="What an engine here decided about this request.")] = "",
    all_blocks: Annotated[bool, typer.Option("--all", help="Show blocks that are there, too.")] = False,
    config: Config = "",
    master: Master = "",
    endpoint: Endpoint = "",
    protocol: Protocol = "",
    as_json: Json = False,
) -> None:
    """Which blocks of a prompt are in the pool, under which keys, and why no more of it is, or was, hit."""
    with session_of(ctx, as_json, config, master, endpoint, protocol) as (session, answer):
        if sum(map(bool, (tokens_file, prompt_file, request_id))) != 1:
            raise CommandError("give one of --tokens-file, --prompt-file and --request-id")
        if request_id:
            answer(explain_request(request_id))
            return
        seed = session.environ.get("PYTHONHASHSEED", "") if hash_seed is None else hash_seed
        if not seed:
            raise CommandError(
                "the engine's PYTHONHASHSEED is not known: set it here too, or give --hash-seed. Without one, engines "
                "up to vLLM 0.23 share nothing"
            )
        ids = read_tokens(tokens_file) if tokens_file else tokenize(prompt_file or Path(), model)
        question = Question(ids, namespace, seed, hash_algorithm, "", salt, hash_block_size)
        answer(explain(session, question, all_blocks=all_blocks))


@app.command("bench")
def _bench(
    ctx: typer.Context,
    model: ModelName = "deepseek-v3.2",
    blocks: Annotated[int, typer.Option(min=1, help="Blocks to move at once.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Times; the median is shown.")] = 5,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Of the engine; one rank is measured.")] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(min=1, help="Of the engine; its largest stage.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Write the picture here too (SVG).")] = None,
    config: Config = "",
    master: Master = "",
    endpoint: Endpoint = "",
    protocol: Protocol = "",
    as_json: Json = False,
) -> None:
    """The raw store's speed, then the connector's, for a model's blocks."""
    with session_of(ctx, as_json, config, master, endpoint, protocol) as (session, answer):
        case = Case(model, blocks, repeats, tensor_parallel_size, pipeline_parallel_size)
        answer(bench(session, case, plot))
