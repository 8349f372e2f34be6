"""The rows of the table: which engines, asked how, in rounds that take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from benchmarks import intervals
from benchmarks.peers.process import Peer

console = Console(stderr=True)


@dataclass(frozen=True)
class Variant:
    """An engine (`family` and weight `format`), and how it is asked: `signals` where it has any."""

    family: str
    format: str
    options: tuple[tuple[str, Any], ...]
    signals: str | None = None

    @property
    def name(self) -> str:
        """What the table calls it."""
        match self.family, self.signals:
            case "ours", signals:
                return f"ours {self.format}, signals {signals}"
            case family, "full":
                return f"{family} {self.format}, with attentions, hidden states and lens"
        return f"{self.family} {self.format}"

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of every question to it."""
        if self.family == "ours":
            return {"signals": self.signals}
        return {"signals": True} if self.signals else {}


class Peers:
    """Processes by what they hold, each started when first asked for and kept until the end."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._open = contextlib.ExitStack()
        self._peers: dict[tuple[str, str], Peer] = {}

    def of(self, variant: Variant) -> Peer:
        """Return the process that `variant` runs in, which other variants may share."""
        key = variant.family, variant.format
        if key not in self._peers:
            console.print(f"[dim]starting {' '.join(key)}")
            self._peers[key] = self.fresh(variant)
            self._open.callback(self._peers[key].close)
        return self._peers[key]

    def fresh(self, variant: Variant) -> Peer:
        """Return a process of its own, for the caller to close."""
        return Peer(variant.family, threads=self.threads, **dict(variant.options))

    def describe(self) -> dict[str, Any]:
        """Return what every process says of itself."""
        return {" ".join(key): peer.ask("describe") for key, peer in self._peers.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._open.close()


@dataclass
class Row:
    """One figure of one variant: tokens per second, a value a round."""

    measure: str  # "prefill" or "decode"
    size: int  # tokens of the prompt, or sequences decoded together
    variant: Variant
    rounds: list[float] = field(default_factory=list)
    limit_share: float | None = None

    @property
    def key(self) -> str:
        """What `limit_share` calls it."""
        return f"{self.measure} {self.size}: {self.variant.name}"

    def as_dict(self) -> dict[str, Any]:
        """Return it for the JSON, raw rounds included."""
        found = intervals.of(self.rounds)
        return {
            "measure": self.measure,
            "size": self.size,
            "engine": self.variant.family,
            "format": self.variant.format,
            "signals": self.variant.signals,
            "tokens_per_s": found.median,
            "lower95": found.lower95,
            "upper95": found.upper95,
            "limit_share": self.limit_share,
            "rounds": self.rounds,
        }


def take_turns(
    rows: Sequence[Row], rounds: int, measure: Callable[[Row, int], float], title: str
) -> list[Row]:
    """Fill every row with `rounds` figures, after one round that is not counted.

    Every round asks every row once and begins with another one, so that what changes slowly, such
    as the clock of the cores, meets all alike.
    """
    for number in range(-1, rounds):
        console.print(f"[dim]{title}: {'warming up' if number < 0 else f'round {number + 1} of {rounds}'}")
        for row in turned(rows, number):
            figure = measure(row, number)
            console.print(f"[dim]    {row.variant.name}: {figure:,.1f} tokens/s")
            if number >= 0:
                row.rounds.append(figure)
    return list(rows)


def turned(rows: Sequence[Row], by: int) -> Iterator[Row]:
    """The rows in order, beginning with another one for each `by`."""
    start = by % len(rows)
    yield from rows[start:]
    yield from rows[:start]
