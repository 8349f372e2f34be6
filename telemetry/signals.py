"""What detectors may see: signals and business events, never fault state or annotations.

`telemetry` strips everything that chaos knows before it calls a `SignalSink`; `alerting` and any
other detector implement the protocol. All calls arrive on the front's event loop, in order, and
must return at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from engine.messages import DetailReason

if TYPE_CHECKING:
    import numpy as np

Lost = Literal["tokens", "layers"]
BusinessKind = Literal["interrupted", "completed", "rejected", "failed", "feedback", "task_done"]


class ResponseStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A response began. `canary` responses stay out of business figures. `group`: the kind of its prompt, if
    whoever asks tells."""

    request_id: str
    tenant: str
    route: str
    canary: bool
    model: str
    temperature: float
    prompt_tokens: int
    time: float
    group: str = ""


class TokenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one or more engine steps, in order, the last of them at `time`. `signals` is float32
    [rows, len(TOKEN_SIGNALS)]."""

    time: float
    request_ids: list[str]
    choices: list[int]
    steps: list[int]
    signals: np.ndarray


class LayerBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled layer detail of one step: `lens_entropy` [rows, layers] (float16), `heads`
    [rows, len(HEAD_SIGNALS), layers, heads] (float16). NaN is absent.

    Which layers are sampled changes from step to step. Row i stands for 1 ÷ `rates[i]` tokens, each
    layer for `stride` layers, the last for itself.
    """

    time: float
    request_ids: list[str]
    choices: list[int]
    steps: list[int]
    layers: list[int]
    stride: int
    reasons: list[DetailReason]
    rates: list[float]
    lens_entropy: np.ndarray
    heads: np.ndarray


class ResponseEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A response is over; no more of its tokens follow."""

    request_id: str
    time: float
    finish_reason: str
    disconnected: bool
    completion_tokens: int
    aggregates: dict[str, float]


class BusinessEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something a user did, or that happened to a user."""

    kind: BusinessKind
    request_id: str
    tenant: str
    route: str
    time: float
    value: float | None = None  # rating of a feedback, −1…1


class SignalSink(Protocol):
    """A listener of signals (evaluator, canary scorer, …)."""

    def on_started(self, event: ResponseStarted) -> None: ...

    def on_lost(self, request_id: str, choice: int, what: Lost) -> None:
        """A token's row, or its layer detail alone, was lost on its way and will not come."""
        ...

    def on_tokens(self, batch: TokenBatch) -> None: ...

    def on_layers(self, batch: LayerBatch) -> None: ...

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        """The first sentence of a choice ended after its `tokens`-th token."""
        ...

    def on_ended(self, event: ResponseEnded) -> None: ...

    def on_business(self, event: BusinessEvent) -> None: ...
