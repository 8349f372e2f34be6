"""One generated answer with its signals, and how a batch of them is kept in a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from alerting.files import write
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` is float32 [tokens, TOKEN_SIGNALS], `heads` float16 [tokens, HEAD_SIGNALS, layers, heads], as
    bytes. `touched`: the fault acted on it. Seconds are those from its submission to its end. It is `correct`
    as its item says, `as_asked` where another question was asked in the item's place. `peers`: scores that
    others use, where they were wanted."""

    item: str
    family: str
    text: str
    correct: bool
    touched: bool
    sentence: int | None
    seconds: float
    layers: int
    tokens: bytes
    heads: bytes
    as_asked: bool | None = None
    peers: dict[str, float] = {}

    @property
    def right(self) -> bool:
        """Whether it is right to say to what was asked after all."""
        return self.correct if self.as_asked is None else self.as_asked

    @property
    def token_rows(self) -> NDArray[np.float32]:
        """The token signals."""
        return np.frombuffer(self.tokens, "<f4").reshape(-1, len(TOKEN_SIGNALS))

    @property
    def head_rows(self) -> NDArray[np.float16]:
        """The layer detail; one row a token, none without detail."""
        if not self.heads:
            return np.empty((0, len(HEAD_SIGNALS), self.layers, 1), np.float16)
        return np.frombuffer(self.heads, "<f2").reshape(
            len(self.token_rows), len(HEAD_SIGNALS), self.layers, -1
        )


class Store:
    """Batches of answers in files of one folder, so that a run that was broken off goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str, count: int) -> list[Answer] | None:
        """Return a batch of `count` answers; None when it is not there, or not whole."""
        try:
            found = msgspec.msgpack.decode((self._folder / f"{name}.msgpack").read_bytes(), type=list[Answer])
        except (OSError, msgspec.MsgspecError):
            return None
        return found if len(found) == count else None

    def write(self, name: str, answers: list[Answer]) -> None:
        """Keep a batch; raises OSError when the disk refuses."""
        write(self._folder / f"{name}.msgpack", msgspec.msgpack.encode(answers))
