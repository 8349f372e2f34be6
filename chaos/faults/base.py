"""What a fault is: validated numbers, a place where it acts, and what it should move.

A new fault is one file in this folder and one line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import msgspec

from engine.hooks import Encoding

#: Largest whole number among a fault's parameters.
MAX_COUNT = 2**31 - 1

Messages = list[dict[str, Any]]
#: Cuts a text into token-sized pieces whose concatenation is the text again.
Pieces = Callable[[str], list[str]]


#: Where a fault acts: before the model, in its process, on streamed answers, on telemetry.
Place = Literal["prompt", "model", "stream", "telemetry"]
#: A tier of the KV cache below the page pool.
Tier = Literal["host", "disk"]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The parameters of one fault; the class declares the rest.

    `order` is the place in the chain when several kinds act on one request: lower first, and by the
    kind's name where two are equal. `moves` names the signals and business figures that should react,
    `control` the parameters that turn the fault into its matched harmless control. `caps` are the
    largest values that a server allows unless its settings say otherwise; the bounds in a
    parameter's own `Meta` hold whatever the settings are. A fault of scope `process` acts on the whole model
    process: it takes no selector. `tier` is the tier of the KV cache without which
    there is nothing to strike.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    place: ClassVar[Place]
    scope: ClassVar[Literal["request", "process"]] = "request"
    tier: ClassVar[Tier | None] = None
    order: ClassVar[int]
    moves: ClassVar[tuple[str, ...]]
    control: ClassVar[dict[str, bool | float]]
    caps: ClassVar[dict[str, float]] = {}


class PromptFault(Fault, frozen=True, kw_only=True):
    """A fault that rewrites what the user wrote, before the chat template."""

    place: ClassVar[Place] = "prompt"

    def rewrite(self, messages: Messages, seed: int, pieces: Pieces) -> Messages | None:
        """Return new messages, or None when there is nothing here to act on.

        Never writes to the argument. The result depends on the arguments alone.
        """
        raise NotImplementedError


class EncodingFault(Fault, frozen=True, kw_only=True):
    """A fault in how messages become token ids."""

    place: ClassVar[Place] = "prompt"

    def encode(self, encoding: Encoding, *, chat: bool, bos: bool) -> Encoding | None:
        """Return how the prompt is encoded, None when there is nothing here to act on.

        `chat`: it has a chat template; `bos`: the model has a beginning-of-text token.
        """
        raise NotImplementedError
