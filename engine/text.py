"""From token ids to final text: whole characters only, stop strings never shown."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that text needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; empty for control tokens."""
        ...


class TextStream:
    """Turns one choice's tokens into text that will not change any more.

    Bytes of a cut character are kept until the character is whole; a suffix that may still grow into
    a stop string is kept until it has or cannot. The result does not depend on how tokens are split
    into calls: generation stops at the stop string that is complete first (of several complete at
    once, the one that began first), and the text ends before it.

    `offsets[i]` is the length in characters of the text before token i; `length` is the length
    returned so far.
    """

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self.stopped = False
        self.offsets: list[int] = []
        self.length = 0
        self._token_bytes = tokenizer.token_bytes
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take tokens and return the text that became final, often empty. After a stop, always empty."""
        for token_id in token_ids:
            if self.stopped:
                break
            self.offsets.append(self.length + len(self._held))
            self._held += self._decoder.decode(self._token_bytes(token_id))
            self._cut()
        return self._release(len(self._held) if self.stopped else len(self._held) - self._undecided())

    def finish(self) -> str:
        """Return what was held back. A character cut by the end of generation is dropped."""
        return self._release(len(self._held))

    def _cut(self) -> None:
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            self._held = self._held[: min(ends)[1]]
            self.stopped = True

    def _undecided(self) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _release(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        self.length += len(text)
        return text
