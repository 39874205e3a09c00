"""Arguments as Mooncake's binding takes them: what it would refuse raises `TypeError` here too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

Pieces = Sequence[Sequence[int]]
END_OF_UNSIGNED = 1 << 64


def integer(value: Any) -> int:
    """An unsigned 64-bit number. Taken: ints, and what turns into one (numpy's scalars), but no `float`."""
    if type(value) is not int:
        if isinstance(value, float | str | bytes) or not (hasattr(value, "__index__") or hasattr(value, "__int__")):
            raise TypeError(f"{value!r} is no unsigned integer")
        value = int(value)
    if not 0 <= value < END_OF_UNSIGNED:
        raise TypeError(f"{value!r} is outside the unsigned 64-bit integers")
    return int(value)


def boolean(value: Any) -> bool:
    """A truth value: bool, None, or what defines `__bool__`."""
    if value is None or hasattr(value, "__bool__"):
        return bool(value)
    raise TypeError(f"{value!r} is no truth value")


def text(value: Any) -> str:
    """A key or name: str without lone surrogates, or bytes."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no str")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TypeError(f"{value!r} cannot be encoded: {error}") from None
    return value


def sequence(value: Any) -> Sequence[Any]:
    """What the binding takes for a list: lists, tuples, arrays; no str, bytes, set, dict or iterator."""
    if type(value) is list:
        return value
    unordered = isinstance(value, str | bytes | Mapping | AbstractSet)
    if unordered or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise TypeError(f"{type(value).__name__} is no list")
    return list(value)


def texts(value: Any) -> list[str]:
    """A list of keys."""
    return [text(one) for one in sequence(value)]


def integers(value: Any) -> Sequence[int]:
    """A list of unsigned numbers."""
    found = sequence(value)
    # Long lists are the rule, and nearly always ints.
    if set(map(type, found)) <= {int}:
        if found and not (min(found) >= 0 and max(found) < END_OF_UNSIGNED):
            raise TypeError("a number is outside the unsigned 64-bit integers")
        return found
    return [integer(one) for one in found]


def nested(value: Any) -> Pieces:
    """A list of lists of unsigned numbers."""
    return [integers(one) for one in sequence(value)]


def deeper(value: Any) -> Sequence[Pieces]:
    """A list of lists of lists of unsigned numbers."""
    return [nested(one) for one in sequence(value)]


def contents(value: Any) -> bytes:
    """The bytes that a put of `value` stores: as many as it has *items*, which for items of several bytes are fewer."""
    view = memoryview(value)
    num_items = view.nbytes // view.itemsize
    return view.tobytes()[:num_items]


def num_bytes(value: Any) -> int:
    """A size in a configuration: an int, or words such as `"16mb"`. Raises `ValueError`."""
    words = str(value).strip().lower()
    for unit, factor in (("gb", 1 << 30), ("mb", 1 << 20), ("kb", 1 << 10), ("g", 1 << 30), ("m", 1 << 20)):
        if words.endswith(unit):
            return int(float(words.removesuffix(unit)) * factor)
    return int(words.removesuffix("b"))
