"""What every engine under measurement can do, in its own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Prompt = list[int]


class Subject(Protocol):
    """An engine that is told when to work. It must sleep in between: others are being measured.

    Each takes what is named here, and whatever else its engine can be told.
    """

    @property
    def describe(self) -> Callable[[], dict[str, Any]]:
        """() → what runs: `weight_bytes` that one step reads, versions, the configuration chosen."""

    @property
    def prefill(self) -> Callable[..., float]:
        """(prompt) → seconds from a prompt to the choice of its first token."""

    @property
    def prepare(self) -> Callable[..., None]:
        """(prompts, steps): begin a sequence for each prompt, of which `steps` tokens more may be asked."""

    @property
    def decode(self) -> Callable[..., float]:
        """(steps) → seconds that `steps` further greedy tokens of every sequence took."""

    @property
    def score(self) -> Callable[..., dict[str, Any]]:
        """(windows) → for every token after the first of each window, its natural-log probability
        (`logprobs`) and the likeliest token in its place (`top1`)."""


def resident_mb() -> float:
    """Return the resident memory of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmRSS")
