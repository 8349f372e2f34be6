"""The text that everything is measured on: this project's own documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine.tokenizer import Tokenizer

_ROOT = Path(__file__).parents[1]
FILES = (
    "docs/architecture.md",
    "docs/signals.md",
    "docs/alerts.md",
    "docs/chaos.md",
    "README.md",
    "CONTRIBUTING.md",
)
WINDOW = 512


@dataclass(frozen=True)
class Text:
    """Token ids of all files, one after another."""

    tokens: list[int]

    @classmethod
    def read(cls, tokenizer: Tokenizer) -> Self:
        """Tokenise the files of this checkout."""
        whole = "\n\n".join((_ROOT / name).read_text() for name in FILES)
        return cls(tokenizer.encode(whole))

    def prompt(self, length: int, number: int) -> list[int]:
        """Return a piece of `length` tokens; another number gives one that begins elsewhere."""
        start = (number * 61 + 31) % (len(self.tokens) - length)
        return self.tokens[start : start + length]

    def windows(self, most: int) -> list[list[int]]:
        """Return the first `most` whole windows of WINDOW tokens, side by side."""
        starts = range(0, len(self.tokens) - WINDOW + 1, WINDOW)
        return [self.tokens[start : start + WINDOW] for start in starts][:most]
