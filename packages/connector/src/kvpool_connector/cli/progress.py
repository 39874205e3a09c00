"""How far a command is, on standard error, where somebody looks at a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, TaskID

Tell = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much; both counts from 0."""


def silent(work: str, done: int, total: int) -> None:
    """Tells nobody."""


class ProgressBar:
    """One bar for each kind of work; they go when the command ends."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._bar = Progress(console=self._console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def tell(self, work: str, done: int, total: int) -> None:
        """Nothing is drawn where standard error is no terminal, nor before the first word: questions come first."""
        if not self._console.is_terminal:
            return
        if not self._tasks:
            self._bar.start()
        if work not in self._tasks:
            self._tasks[work] = self._bar.add_task(work, total=total)
        self._bar.update(self._tasks[work], completed=done, total=total)

    def close(self) -> None:
        """Take the bars away: what is printed under one that is still drawn, it would wipe off."""
        if self._tasks:
            self._bar.stop()
            self._tasks.clear()
