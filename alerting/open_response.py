"""Responses that stream: what is kept of each, and the table that feeds them.

Choice 0 stands for its response.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from alerting.rules import RawPreset
from alerting.scores import Frozen, LayerRow, rows_of
from alerting.scores.response import HeadRows, combined
from alerting.statistics import ResponseTracker
from telemetry.signals import LayerBatch, Lost, ResponseEnded, ResponseStarted, TokenBatch

MAX_OPEN = 4096


class OpenResponse:
    """A response that streams.

    `raw_l1`: the raw presets whose condition held at one of its tokens. `lost`: what telemetry lost of it.
    """

    __slots__ = ("lost", "raw_l1", "started", "tracker")

    def __init__(self, started: ResponseStarted, surprisal: float | None = None) -> None:
        self.started = started
        self.tracker = ResponseTracker(surprisal)
        self.raw_l1: set[str] = set()
        self.lost: set[Lost] = set()


class JudgedResponse(OpenResponse):
    """What the evaluator keeps of one."""

    __slots__ = ("cusum_limit", "detail", "frozen", "judged", "l1")

    def __init__(self, started: ResponseStarted, frozen: Frozen | None, cusum_limit: float) -> None:
        """An L1 of the paging preset is certain once the CUSUM is beyond `cusum_limit`."""
        super().__init__(started, None if frozen is None else frozen.surprisal)
        self.frozen = frozen
        self.cusum_limit = cusum_limit
        self.detail = None if frozen is None else HeadRows(frozen)
        self.l1: set[str] = set()  # presets whose L1 it raised
        self.judged = False  # the first sentence was

    def statistics(self) -> dict[str, float]:
        """Return all statistics of a response that is over."""
        found = self.tracker.sentence | self.tracker.whole()
        if self.frozen is None or self.detail is None or "layers" in self.lost or not found:
            return found
        found |= self.detail.scores()
        return found | combined(found, self.frozen)


R = TypeVar("R", bound=OpenResponse)


class OpenResponses(Generic[R]):
    """The responses that stream, by request. Beyond `MAX_OPEN` the oldest is forgotten.

    A response that lost a token is fed no more: nothing that its other tokens say is of the whole.
    """

    def __init__(self, raw: Mapping[str, RawPreset]) -> None:
        self._raw = raw
        self._open: OrderedDict[str, R] = OrderedDict()

    def open(self, response: R) -> None:
        """Follow a response from now on."""
        for preset in self._raw.values():
            response.tracker.watch_run(preset.confidence)
        self._open[response.started.request_id] = response
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def close(self, request_id: str) -> R | None:
        """Return a response that is over; None for one that is not followed."""
        return self._open.pop(request_id, None)

    def feed(self, batch: TokenBatch) -> Iterator[tuple[R, list[float], tuple[str, ...]]]:
        """Take tokens in; yield each with its response and the raw presets whose condition holds there."""
        for request_id, choice, row in zip(
            batch.request_ids, batch.choices, batch.signals.tolist(), strict=True
        ):
            response = self._open.get(request_id)
            if response is None or choice or "tokens" in response.lost:
                continue
            response.tracker.add(row)
            raw: tuple[str, ...] = ()
            for name, preset in self._raw.items():
                if raw_condition(response.tracker, preset):
                    raw = (*raw, name)
                    response.raw_l1.add(name)
            yield response, row, raw

    def lose(self, request_id: str, choice: int, what: Lost) -> None:
        """Part of a response will not come."""
        response = self._open.get(request_id)
        if response is not None and not choice:
            response.lost.add(what)

    def details(self, batch: LayerBatch) -> Iterator[tuple[R, LayerRow]]:
        """Yield layer rows with their responses."""
        for request_id, choice, row in rows_of(batch):
            response = self._open.get(request_id)
            if response is not None and not choice:
                yield response, row

    def end_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        """The first sentence of a choice ended after its `tokens`-th token."""
        response = self._open.get(request_id)
        if response is not None and not choice:
            response.tracker.end_sentence(tokens)


def raw_condition(tracker: ResponseTracker, preset: RawPreset) -> bool:
    """Return whether a raw preset's L1 condition holds at the newest token."""
    return tracker.run_below(preset.confidence) >= preset.run and tracker.mean_entropy > preset.entropy


def complete(event: ResponseEnded) -> bool:
    """Return whether a response reached its own end, so that whole-response statistics count."""
    return event.finish_reason in ("stop", "length") and not event.disconnected
