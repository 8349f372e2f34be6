"""What the user sees while the demo runs: what happens now, how far it is, how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Show:
    """Lines on the console; on a terminal also a bar for the phase that runs."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line with the demo's clock in front."""
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        self.console.print(f"[dim]{minutes:02d}:{seconds:02d}[/dim] {text}", highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Announce a phase of `total` responses; yields what takes the count so far."""
        self.say(title)
        if not self.console.is_terminal:
            yield lambda _count: None
            return
        columns = (
            TextColumn("      "),
            BarColumn(32),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(title, total=total)
            yield lambda count: progress.update(task, completed=count)
