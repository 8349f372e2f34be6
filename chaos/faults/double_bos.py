"""A beginning of text that is there twice: the attention sink moves."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from chaos.faults.base import EncodingFault
from engine.hooks import Encoding


class DoubleBos(EncodingFault, frozen=True, kw_only=True):
    """Puts `count` more beginning-of-text tokens in front of a prompt.

    Does nothing with a model that has no such token, nor to prompts that come as token ids. At `count` 0
    the same path runs and the prompt stays.
    """

    kind: ClassVar[str] = "double_bos"
    title: ClassVar[str] = "Duplicated beginning-of-text token"
    order: ClassVar[int] = 33
    moves: ClassVar[tuple[str, ...]] = ("sink_mass", "head_kl", "head_kl_nonsink")
    control: ClassVar[dict[str, bool | float]] = {"count": 0}

    count: Annotated[int, Meta(ge=0, le=64, description="tokens put in front")] = 1

    def encode(self, encoding: Encoding, *, chat: bool, bos: bool) -> Encoding | None:
        return msgspec.structs.replace(encoding, bos=encoding.bos + self.count) if bos else None
