"""What every engine under measurement can do, in its own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

Prompt = list[int]


class Subject(Protocol):
    """An engine that is told when to work. It must sleep in between: others are being measured."""

    def describe(self) -> dict[str, Any]:
        """Return what runs: `weight_bytes` that one step reads, versions, the configuration chosen."""
        ...

    def prefill(self, prompt: Prompt, **how: Any) -> float:
        """Return the seconds from a prompt to the choice of its first token."""
        ...

    def prepare(self, prompts: list[Prompt], steps: int, **how: Any) -> None:
        """Begin one sequence for each prompt; up to `steps` further tokens of each will be asked for."""
        ...

    def decode(self, steps: int, **how: Any) -> float:
        """Return the seconds that `steps` further greedy tokens of every sequence took."""
        ...

    def score(self, windows: list[Prompt], **how: Any) -> dict[str, list[float] | list[int]]:
        """Return, for every token after the first of each window, its natural-log probability
        (`logprobs`) and the likeliest token in its place (`top1`)."""
        ...


def resident_mb() -> float:
    """Return the resident memory of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmRSS")
