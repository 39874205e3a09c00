"""What every call of a client goes through: is it set up, does a fault befall it, is it still under way at close."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from kvpool_simulator.store.codes import WouldCrashError

if TYPE_CHECKING:
    from kvpool_simulator.store.connection import Connection

Client = TypeVar("Client", bound="Connection")
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[Client, P], R]


def call(idle: Callable[..., Any] | None = None) -> Callable[[Method[Client, P, R]], Method[Client, P, R]]:
    """A call of the store. `idle`: what it returns before `setup` and after `close`; without, it would crash then."""

    def decorate(method: Method[Client, P, R]) -> Method[Client, P, R]:
        name = method.__name__

        @functools.wraps(method)
        def guarded(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not self.ready:
                if idle is None:
                    raise WouldCrashError(f"{name} before setup() or after close()")
                found: R = idle(*args, **kwargs)
                return found
            if self.process != os.getpid():
                raise WouldCrashError(f"{name} in a child of fork: the real call would never return")
            with self.under_way:
                fault = self.fault_for(name, keys_of(*args, *kwargs.values()))
                if fault is None:
                    return method(self, *args, **kwargs)
                self.pass_time(fault.delay_s)
                if fault.raises is not None:
                    raise fault.raises
                if fault.replaces:
                    return fault.instead  # type: ignore[return-value]
                self.set_transfer_time(fault.transfer_s)
                try:
                    answer = method(self, *args, **kwargs)
                finally:
                    self.set_transfer_time(0.0)
                return answer if fault.change is None else fault.change(answer)

        return guarded

    return decorate


def keys_of(*arguments: Any) -> Sequence[str]:
    """The keys that a call names: its first argument, when that is one or several."""
    first = arguments[0] if arguments else None
    if isinstance(first, str):
        return [first]
    return [one for one in first if isinstance(one, str)] if isinstance(first, list | tuple) else []
