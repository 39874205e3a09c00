"""The tokens of a prompt, from a file of token ids or of text."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from kvpool_connector.cli.output import CommandError

MAX_FILE_BYTES = 64 << 20
"""Some ten million tokens; whatever a path leads to, no more is read."""


def read_tokens(path: Path) -> list[int]:
    """A JSON list of token ids, or ids separated by white space or commas. Raises `CommandError`."""
    text = _read(path)
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(w) for w in text.replace(",", " ").split()]
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}: expected token ids ({error})") from error
    wrong = next((token for token in ids if type(token) is not int or token < 0), None)
    if wrong is not None or not ids:
        raise CommandError(
            f"{path}: expected whole numbers of at least 0, found {wrong!r}" if ids else f"{path}: empty"
        )
    return ids


def tokenize(path: Path, model: str) -> list[int]:
    """Tokens of a text, by the model's own tokenizer. Raises `CommandError`."""
    text = _read(path)
    if not model:
        raise CommandError("--prompt-file needs --model, the path or name whose tokenizer the engine uses")
    try:
        transformers = importlib.import_module("transformers")
        ids = transformers.AutoTokenizer.from_pretrained(model).encode(text)
    except ImportError as error:
        raise CommandError(
            "--prompt-file needs the library transformers; run the command where the engine is installed, or give the "
            "token ids with --tokens-file"
        ) from error
    except (OSError, ValueError) as error:
        raise CommandError(f"no tokenizer of {model!r}: {error}") from error
    return [int(token) for token in ids]


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise CommandError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        return text.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read as text: {error}") from error
