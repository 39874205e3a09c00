"""What can befall a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

AS_USUAL = object()


@dataclass(frozen=True)
class Fault:
    """One call's misfortune. Several can come together; they strike in the order of the fields.

    What serves clients in other processes must be picklable: `change` then has to be a function of a module.
    """

    delay_s: float = 0.0
    """Time that passes before the call does anything."""
    raises: BaseException | None = None
    """Raised instead of the call."""
    instead: object = AS_USUAL
    """Returned instead of the call: a code, a list too short, None. Nothing is done."""
    transfer_s: float = 0.0
    """Time that passes between the master's answer and the end of the transfer."""
    change: Callable[[Any], Any] | None = None
    """Changes what the call returns; the call is done."""

    @property
    def replaces(self) -> bool:
        """Whether `instead` is set."""
        # By type: across processes the marker is another object.
        return type(self.instead) is not object


Faults = Callable[[str, Sequence[str]], Fault | None]
"""Asked at each call of a client, with the call's name and its keys: what befalls it, or None."""
