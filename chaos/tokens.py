"""Cuts text at the model's own token borders, for faults that count tokens."""

from __future__ import annotations

from typing import Protocol

from chaos.faults.base import Pieces
from chaos.faults.text import pieces


class ByteTokenizer(Protocol):
    """What `engine.tokenizer.Tokenizer` offers of it."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def token_pieces(tokenizer: ByteTokenizer) -> Pieces:
    """Return a function that cuts a text into one piece a token.

    Tokens that share a character are one piece, so that no cut breaks it. Where the tokens do not
    spell the text again (a normalising tokenizer), the estimate of `chaos.faults.text` is used.
    """

    def cut(text: str) -> list[str]:
        parts = [tokenizer.token_bytes(token) for token in tokenizer.encode(text, special=False)]
        if b"".join(parts) != text.encode():
            return pieces(text)
        found: list[str] = []
        pending = b""
        for part in parts:
            pending += part
            try:
                found.append(pending.decode())
            except UnicodeDecodeError:
                continue
            pending = b""
        return found

    return cut
