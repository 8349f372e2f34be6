"""Where the first sentence of an answer ends, found while it streams."""

from __future__ import annotations

import re

_END = re.compile(r"[.!?](?=\s)|\n")


class FirstSentence:
    """Ends at the first `.`, `!` or `?` before a space or the end, or at a newline after content."""

    __slots__ = ("_content", "_maybe", "_tokens", "length")

    def __init__(self) -> None:
        self.length: int | None = None  # in tokens, once it is known
        self._tokens = 0
        self._content = False
        self._maybe: int | None = None  # tokens up to a mark whose follower is not known yet

    def push(self, text: str, tokens: int) -> int | None:
        """Take the next text and the tokens it came from; return the sentence's tokens, once."""
        if self.length is not None:
            return None
        if self._maybe is not None and text:
            if text[0].isspace():
                return self._end(self._maybe)
            self._maybe = None
        self._tokens += tokens
        for match in _END.finditer(text):
            if match.group() != "\n" or self._content or text[: match.start()].strip():
                return self._end(self._tokens)
        if text and text[-1] in ".!?":
            self._maybe = self._tokens
        self._content = self._content or bool(text.strip())
        return None

    def finish(self) -> int | None:
        """The answer is over: a mark at its very end counts."""
        return None if self.length is not None or self._maybe is None else self._end(self._maybe)

    def _end(self, tokens: int) -> int:
        self.length = tokens
        return tokens
