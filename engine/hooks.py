"""The protocols by which other packages plug into the engine; the engine imports none of them.

`quaver` composes: it hands the front process a `PromptHook`, an `AdmissionGate` and an
`Observer`, and names the model process's `ModelHook` by import path (`"package.module:factory"`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from engine.messages import AttachFault, FinishReason, RequestMeta, SamplingParams, StepOutput

if TYPE_CHECKING:
    from torch import Tensor

    from engine import scheduler
    from engine.kv.disk import DiskStore
    from engine.kv.disk_files import Files
    from engine.kv.host import HostStore
    from engine.models.config import ModelConfig
    from engine.roster import Roster


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request is not admitted; becomes an OpenAI-shaped error before any 200."""

    status: int  # 429 or 503
    code: str
    message: str
    retry_after_s: float = 1.0


class AdmissionGate(Protocol):
    """Decides at the door; called in the front process for every generation request."""

    def admit(self, meta: RequestMeta) -> Rejection | None:
        """Return None to admit. Must not block."""
        ...


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """How a prompt becomes token ids: by another chat template than the model's, with `bos` more
    beginning-of-text tokens in front."""

    template: str | None = None
    bos: int = 0


class PromptHook(Protocol):
    """Faults in prompts. Front process."""

    def apply(
        self, meta: RequestMeta, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the messages to use and the ids of the faults that changed them.

        `messages` are OpenAI-style dicts with string `content`; text completions arrive as one
        message with role `prompt`. The argument is never mutated. With no match, the same list
        object and an empty list come back. Called on a thread for long messages.
        """
        ...

    def encoding(self, meta: RequestMeta, *, chat: bool, bos: bool) -> tuple[Encoding, list[str]]:
        """Return how the prompt is encoded and the ids of the faults that have a say in it.

        `chat`: it goes through a chat template; `bos`: the model has a beginning-of-text token.
        """
        ...


class StreamHook(Protocol):
    """Faults in streamed answers. Front process, event loop."""

    active: bool

    async def piece(
        self, meta: RequestMeta, number: int, data: bytes, gone: Callable[[], bool]
    ) -> tuple[bytes | None, list[str]]:
        """Return what is sent as the `number`-th piece of an answer, and the ids of the faults it met.

        None closes the connection instead. It may wait as long as `gone` says no.
        """
        ...


class DetailHook(Protocol):
    """Faults that lose token detail before telemetry takes it in. Front process, event loop."""

    active: bool

    def lost(
        self, metas: Sequence[RequestMeta | None], choices: Sequence[int], steps: Sequence[int]
    ) -> tuple[set[int], set[int]]:
        """Return the rows of a step that are lost, and those that lose their layer detail."""
        ...


class ModelHook(Protocol):
    """Faults inside the model process. Costs a look at these flags a step while none is attached.

    `active`: any is in force; `on_…`: one of those that act there is.
    """

    active: bool
    on_tiers: bool
    on_prompts: bool
    on_pages: bool
    on_head: bool
    on_logits: bool
    on_sampling: bool

    def attach(self, fault: AttachFault) -> None:
        """Take a fault into force; raises ValueError when the kind or its numbers are not valid."""
        ...

    def detach(self, fault_id: str | None) -> None:
        """End one fault, or all (None). Unknown ids are ignored."""
        ...

    def expire(self, now: float) -> bool:
        """End leases whose time (`time.monotonic`) is over; True when the set changed."""
        ...

    def fault_ids(self) -> list[str]:
        """Ids in force, in order of attachment."""
        ...

    def files(self) -> Files:
        """Return the file system as the disk tier is to use it. Asked for once, if there is a disk tier."""
        ...

    def tiers(self, host: HostStore | None, disk: DiskStore | None) -> None:
        """Act on blocks in the stores of the tiers that there are.

        Called before a step is planned, and only while `on_tiers`.
        """
        ...

    def hold(
        self, running: Sequence[scheduler.Sequence], now: float
    ) -> tuple[set[tuple[str, int]], dict[str, list[str]]]:
        """Return the keys of sequences whose prompt is not computed at `now` (`time.monotonic`), and the
        fault ids by the id of each request that was held.

        Called while a step is planned, and only while `on_prompts`. Others go on meanwhile.
        """
        ...

    def pages(self, roster: Roster, config: ModelConfig) -> dict[str, list[str]]:
        """Strike pages of sequences that run; return the fault ids by the id of each request struck.

        Called before a step, and only while `on_pages`. A sequence is struck only after
        `roster.seclude` of it, and then in its own filled pages alone.
        """
        ...

    def head(
        self,
        metas: Sequence[RequestMeta],
        choices: Sequence[int],
        steps: Sequence[int],
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
    ) -> tuple[dict[int, Tensor], dict[int, list[str]]]:
        """Return the logits [vocab] of each row that changes, and the fault ids of each that was touched.

        `hidden` is float32 [rows, hidden], what the LM head `head` ([R, hidden] → [R, vocab]) reads; it must
        not be written to. What changes here is what the model says: raw signals are of the new logits.
        """
        ...

    def logits(
        self, metas: Sequence[RequestMeta], choices: Sequence[int], steps: Sequence[int], logits: Tensor
    ) -> tuple[Tensor, dict[int, list[str]]]:
        """Return logits to sample from and, for each row that was changed, the fault ids.

        `logits` is float32 [rows, vocab] and must not be written to: rows that change are copied.
        Row i is about to emit token `steps[i]` of its choice.
        """
        ...

    def sampling(
        self, metas: Sequence[RequestMeta], choices: Sequence[int], params: Sequence[SamplingParams]
    ) -> tuple[list[SamplingParams], dict[int, list[str]]]:
        """Return how each row is sampled and, for each row that was touched, the fault ids."""
        ...


class RequestStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A generation was admitted and handed to the engine. `time` is unix seconds."""

    meta: RequestMeta
    time: float
    endpoint: Literal["chat", "completions"]
    stream: bool
    model: str
    prompt_tokens: int
    choices: int
    max_tokens: int
    temperature: float
    faults: list[str]  # prompt faults that changed it
    prompt: str | None  # the rendered prompt; observers keep it only with content capture on


class ChoiceText(msgspec.Struct, frozen=True, kw_only=True):
    """Text that became final for one choice, as the client sees it."""

    meta: RequestMeta
    choice: int
    text: str
    tokens: int  # tokens this text came from
    time: float


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True):
    """All choices are over, or the client is gone. Sent exactly once per `RequestStarted`."""

    meta: RequestMeta
    time: float
    reason: FinishReason
    disconnected: bool  # the client closed its socket before the end: an interruption
    error: str | None
    prompt_tokens: int
    cached_tokens: int | None = None  # of the prompt's, read instead of computed; None: not known
    tier_tokens: dict[str, int] | None = None  # of these, from "device", "host", "disk"
    loading_s: float = 0.0  # that the prompt waited for "host" and "disk"
    completion_tokens: int
    queued_s: float
    prefill_s: float
    first_token_s: float | None  # from arrival
    duration_s: float
    token_times_s: list[float]  # gaps between tokens, as they left the front
    faults: list[str]
    aggregates: dict[str, float]
    output: str | None  # the whole text of choice 0


class Observer(Protocol):
    """Hears what the engine does. Front process, event loop: every call must return at once."""

    def on_started(self, event: RequestStarted) -> None: ...

    def on_step(self, output: StepOutput) -> None: ...

    def on_text(self, event: ChoiceText) -> None: ...

    def on_ended(self, event: RequestEnded) -> None: ...

    def on_rejected(self, meta: RequestMeta, status: int, code: str) -> None: ...

    def on_engine(self, state: Literal["ready", "lost", "restarting", "stopped"]) -> None: ...


class RecordEncoder(Protocol):
    """Turns a request's token records into JSON for `"signals": true`."""

    def records(self, request_id: str, choice: int, start: int = 0) -> list[dict[str, Any]]:
        """Return one dict per emitted token from the `start`-th on, in order, in the schema of the
        token record."""
        ...
