"""One request from its admission to its end: text, timing, and the events that observers hear."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from engine.api.body import DisconnectedError
from engine.api.errors import ApiError
from engine.api.jobs import Job
from engine.hooks import ChoiceText, RequestEnded, RequestStarted
from engine.messages import Finish, FinishReason
from engine.process.channel import Batch, Token
from engine.process.client import EngineLostError, notify
from engine.text import TextStream

if TYPE_CHECKING:
    from engine.api.state import ApiState

#: From the least to the most serious; a request ends for the worst reason of its choices.
_WORST: tuple[FinishReason, ...] = ("stop", "length", "abort", "shed", "error")
_SETTLE_S = 2.0
#: Codes of engine.core.RequestError that blame the request.
_REFUSALS = (
    "context_length_exceeded",
    "invalid_prompt",
    "invalid_max_tokens",
    "invalid_logit_bias",
    "invalid_top_logprobs",
)


class Delta(NamedTuple):
    """What became final for one choice in one step. `offsets` says where each token's text begins."""

    choice: int
    text: str
    tokens: list[Token]
    offsets: list[int]
    finish: FinishReason | None


class Choice:
    """The text of one choice as it grows."""

    def __init__(self, index: int, stream: TextStream) -> None:
        self.index = index
        self.stream = stream
        self.text: list[str] = []
        self.tokens = 0
        self.finish: FinishReason | None = None
        self.end: Finish | None = None
        self.told = False  # the finish reason is in a delta
        self.last_token: float | None = None
        self._unshown = 0
        self._pending: list[tuple[Token, int]] = []

    def push(self, token: Token) -> str:
        """Take a token unless the text is over, and return the text that became final."""
        text = self.stream.push([token.token_id])
        self.tokens += 1
        self._unshown += 1
        self._pending.append((token, self.stream.offsets[-1]))
        return text

    def delta(self, text: str) -> Delta:
        """Return `text` with the tokens it came from."""
        length = self.stream.length
        shown = [(token, offset) for token, offset in self._pending if offset < length]
        self._pending = [] if self.finish else [item for item in self._pending if item[1] >= length]
        self.text.append(text)
        self.told = self.finish is not None
        return Delta(self.index, text, [t for t, _ in shown], [o for _, o in shown], self.finish)

    def take_unshown(self) -> int:
        """Return the number of tokens since the last call."""
        count, self._unshown = self._unshown, 0
        return count


class Generation:
    """A context manager around one request in the engine.

    Entering hands the choices to the engine and tells observers `on_started`; leaving, for whatever
    reason, tells them `on_ended` exactly once and leaves nothing of the request in the engine.
    """

    def __init__(self, state: ApiState, job: Job) -> None:
        self.job = job
        self.choices = [Choice(i, TextStream(state.tokenizer, job.stop)) for i in range(len(job.submits))]
        self.disconnected = False
        self._state = state
        self._failure: ApiError | None = None
        self._failure_reason: FinishReason = "error"
        self._faults = list(job.faults)
        self._first_token_s: float | None = None
        self._gaps: list[float] = []
        self._left: tuple[float, float] | None = None

    def __enter__(self) -> Self:
        job = self.job
        try:
            self._channel = self._state.client.submit(*job.submits)
        except EngineLostError as error:
            raise ApiError(503, "engine_not_ready", str(error), retry_after_s=2) from None
        self._state.active.add(self)
        self._state.door.enter(job.meta, len(job.submits), time.monotonic())
        self._tell(
            "on_started",
            RequestStarted(
                meta=job.meta,
                time=time.time(),
                endpoint=job.endpoint,
                stream=job.stream,
                model=job.model,
                prompt_tokens=job.prompt_tokens,
                choices=len(job.submits),
                max_tokens=job.max_tokens,
                temperature=job.temperature,
                faults=list(job.faults),
                prompt=job.prompt,
            ),
        )
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._state.client.release(self.job.meta.request_id)
        self._state.active.discard(self)
        self._leave()
        self._tell("on_ended", self._ended(error))

    @property
    def broken(self) -> bool:
        """Whether nobody waits for the answer any more, or it has failed."""
        return self.disconnected or self._failure is not None

    def touch(self, faults: list[str]) -> None:
        """Take note of faults that acted on the answer."""
        self._faults += [fault for fault in faults if fault not in self._faults]

    @property
    def over(self) -> bool:
        """Whether `next` has nothing more to tell."""
        return self._all_ended and self._failure is None

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, up to each choice's stop."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompts that were in the cache, as their first choices found it; None: not known."""
        firsts = self._firsts
        return None if firsts is None else sum(end.cached_tokens for end in firsts)

    @property
    def _firsts(self) -> list[Finish] | None:
        """The ends of the first choice of each prompt, once all are known."""
        ends = [choice.end for choice in self.choices[:: self.job.choices_each]]
        known = [end for end in ends if end is not None]
        return known if len(known) == len(ends) else None

    @property
    def _all_ended(self) -> bool:
        return all(choice.end for choice in self.choices)

    async def next(self) -> list[Delta]:
        """Return what the next step brought, possibly nothing.

        Raises ApiError when the request has failed, DisconnectedError when its client is gone.
        """
        if self._failure is not None:
            raise self._failure
        batch = await self._channel.get()
        if batch is not None:
            deltas = self._absorb(batch)
            if deltas or self._failure is None:
                return deltas
        if self._failure is not None:
            raise self._failure
        raise DisconnectedError

    def disconnect(self) -> None:
        """The client has closed its connection: an interruption, unless it has the whole text."""
        if not self.disconnected and not all(choice.finish for choice in self.choices):
            self.disconnected = True
            self._left = time.time(), time.perf_counter()
            self._channel.interrupt()

    def shut_down(self) -> None:
        """End the request because the server ends."""
        if not self.over:
            self._failure = ApiError(
                503, "shutting_down", "the server is shutting down; the answer is not whole"
            )
            self._failure_reason = "abort"
            self._channel.interrupt()

    async def settle(self) -> None:
        """Stop the engine's work on the request and take in its last figures, if they come soon."""
        self._state.client.abort(self.job.meta.request_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while not self._all_ended:
                    batch = await self._channel.get()
                    if batch is not None:
                        self._absorb(batch)

    def _absorb(self, batch: Batch) -> list[Delta]:
        self.touch(batch.faults)
        texts: dict[int, str] = {}
        for token in batch.tokens:
            choice = self.choices[token.choice]
            self._state.door.begin(self.job.meta.request_id, token.choice, time.monotonic())
            if choice.finish is None and not self.disconnected:
                texts[choice.index] = texts.get(choice.index, "") + choice.push(token)
                self._time(choice, token, batch.arrived)
                if choice.stream.stopped:
                    choice.finish = "stop"
                    self._state.client.abort(self.job.meta.request_id, choice.index)
        for finish in batch.finished:
            self._end(self.choices[finish.choice], finish)
            texts.setdefault(finish.choice, "")
        if self._all_ended:
            self._leave()
        deltas = []
        for index, text in texts.items():
            choice = self.choices[index]
            ending = choice.finish is not None and not choice.told
            final = text + choice.stream.finish() if ending else text
            if final or ending:
                deltas.append(choice.delta(final))
                self._tell_text(choice, final)
        return deltas

    def _leave(self) -> None:
        """Give the places at the door back as soon as the engine is through, however slow the reader."""
        ends = [choice.end for choice in self.choices if choice.end is not None]
        self._state.door.leave(
            self.job.meta.request_id,
            time.monotonic(),
            tokens=self.job.prompt_tokens + self.completion_tokens,
            queued_s=max((end.queued_s for end in ends), default=0.0),
            whole=self._all_ended and all(choice.finish for choice in self.choices),
        )

    def _end(self, choice: Choice, finish: Finish) -> None:
        choice.end = finish
        if choice.finish is None and finish.reason in ("stop", "length"):
            choice.finish = finish.reason
        elif choice.finish is None and not self.disconnected and self._failure is None:
            self._failure_reason = finish.reason
            self._failure = _failure(finish)

    def _time(self, choice: Choice, token: Token, arrived: float) -> None:
        """Note when a token that shows something left; end-of-answer tokens show nothing."""
        if not self._state.tokenizer.token_bytes(token.token_id):
            return
        if self._first_token_s is None:
            self._first_token_s = arrived - self.job.arrived
        if choice.last_token is not None:
            self._gaps.append(arrived - choice.last_token)
        choice.last_token = arrived

    def _tell_text(self, choice: Choice, text: str) -> None:
        if text:
            tokens = choice.take_unshown()
            event = ChoiceText(
                meta=self.job.meta, choice=choice.index, text=text, tokens=tokens, time=time.time()
            )
            self._tell("on_text", event)

    def _ended(self, error: BaseException | None) -> RequestEnded:
        ends = [choice.end for choice in self.choices if choice.end is not None]
        first = self.choices[0].end
        reason, message = self._outcome(error)
        now, clock = self._left or (time.time(), time.perf_counter())
        return RequestEnded(
            meta=self.job.meta,
            time=now,
            reason=reason,
            disconnected=self.disconnected,
            error=message,
            prompt_tokens=self.job.prompt_tokens,
            cached_tokens=self.cached_tokens,
            tier_tokens=_by_tier(self._firsts),
            loading_s=max((end.loading_s for end in ends), default=0.0),
            completion_tokens=self.completion_tokens,
            queued_s=max((end.queued_s for end in ends), default=0.0),
            prefill_s=max((end.prefill_s for end in ends), default=0.0),
            first_token_s=self._first_token_s,
            duration_s=clock - self.job.arrived,
            token_times_s=self._gaps,
            faults=self._faults,
            aggregates=first.aggregates if first is not None else {},
            output="".join(self.choices[0].text),
        )

    def _outcome(self, error: BaseException | None) -> tuple[FinishReason, str | None]:
        if self.disconnected:
            return "abort", None
        if self._failure is not None:
            return self._failure_reason, self._failure.message
        if error is not None:
            cancelled = isinstance(error, asyncio.CancelledError)
            return "abort" if cancelled else "error", f"{type(error).__name__}: {error}".rstrip(": ")
        reasons = [choice.finish or "abort" for choice in self.choices]
        return max(reasons, key=_WORST.index), None

    def _tell(self, method: str, event: object) -> None:
        notify(self._state.observers, method, event)


def _by_tier(ends: list[Finish] | None) -> dict[str, int] | None:
    """Return the cached tokens of all prompts by the tier they came from."""
    if ends is None:
        return None
    found: Counter[str] = Counter()
    for end in ends:
        found.update(end.tier_tokens)
    return dict(found)


def _failure(finish: Finish) -> ApiError:
    """Say what an engine's Finish means to the client."""
    message = finish.error or "the engine stopped this request"
    code, separator, rest = message.partition(": ")
    if finish.reason == "error" and separator and code in _REFUSALS:
        return ApiError(400, code, rest)
    if finish.reason == "shed":
        return ApiError(503, "shed", message, retry_after_s=1)
    return ApiError(503, f"engine_{finish.reason}", f"{message}; the answer is not whole", retry_after_s=2)
