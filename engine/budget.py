"""What layer detail may cost: a share of step time, spent where it tells most.

A bucket holds seconds. Each step pays in its share of the step's time, and layer detail is paid with
what it was measured to take. While the bucket lasts, tokens that look risky get detail; of the rest
every n-th token of a response does, whatever it looks like, with n as small as the budget affords.
Docs: docs/signals.md; why so: docs/decisions/0009-signal-budget.md.

Pure arithmetic: durations and costs come from the caller, in seconds.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.messages import DetailReason

RISKY = 0.5  # below this risk a token never counts as risky
COARSEST = 16  # every so many layers and the last: the least that a sampled token gets
RAREST = 1024  # even the tightest budget samples every so many tokens of a response
_SAVED_STEPS = 32  # the bucket holds the income of so many steps
_FORGIVEN_S = 2.0  # debt of more than the income of so many seconds (a machine that stood still) is let off


Key = tuple[str, int]


class Row(NamedTuple):
    """A token about to be emitted: the `token`-th of choice `key`."""

    key: Key
    token: int
    risk: float  # 0 … 1
    full: bool  # its request asked for every token

    def due(self, every: int) -> bool:
        """Whether it is an `every`-th token, counted from a place that only the key decides on."""
        return (self.token + zlib.crc32(self.key[0].encode()) + self.key[1]) % every == 0


class Sample(NamedTuple):
    """Why a token has layer detail. 1 ÷ `rate` tokens are represented by it."""

    reason: DetailReason
    rate: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Who gets detail in a step, and of which layers: every `stride`-th from some layer on,
    which changes from step to step, and the last."""

    layers: list[int]
    stride: int
    samples: dict[Key, Sample]


NOTHING = Grant([], 0, {})


class Budget:
    """Decides which tokens and layers are sampled so that detail takes `share` of step time.

    0: none at all, 1: every token and every layer. Rows that asked for everything get it outside of
    the budget, unless that is 0. Until a cost is known, only the floor is sampled.
    """

    def __init__(self, share: float, layers: int) -> None:
        self.share = share
        self.layers = layers
        self.strides = [s for s in (1, 2, 4, 8, COARSEST) if s < max(layers, 2)]
        self._decks = {stride: _Deck(stride) for stride in self.strides}
        self._credit = 0.0  # seconds
        self._cost: float | None = None  # seconds for one layer of one row
        self._step: float | None = None  # seconds

    def grant(self, rows: Sequence[Row]) -> Grant:
        """Choose the rows and layers of the next step. Only `settle` changes the books."""
        if self.share == 0 or not rows:
            return NOTHING
        samples = {row.key: Sample("full", 1.0) for row in rows if row.full or self.share == 1}
        stride = 1 if samples else self._stride(4 if self._fill() >= 0.5 else 8)
        if len(samples) < len(rows):
            floor, every = self._floor(len(rows), 1 if samples else None)
            samples |= {row.key: Sample("risk", 1.0) for row in self._risky(rows, stride)}
            stride = min(stride, floor) if samples else floor
            samples |= {
                row.key: Sample("floor", 1.0 / every)
                for row in rows
                if row.key not in samples and row.due(every)
            }
        if not samples:
            return NOTHING
        offset = self._decks[stride].deal()
        return Grant(sorted({*range(offset, self.layers, stride), self.layers - 1}), stride, samples)

    def settle(self, grant: Grant, duration_s: float, detail_s: float) -> None:
        """Take in what the step took, and what its layer detail took of it, the grant included."""
        self._step = _follow(self._step, duration_s)
        paid = detail_s
        if grant.samples:
            own = sum(sample.reason != "full" for sample in grant.samples.values())
            paid *= own / len(grant.samples)
            self._cost = _follow(self._cost, detail_s / (len(grant.samples) * len(grant.layers)))
        self.charge(paid - self.share * duration_s)
        self._credit = min(self._credit, self._room())

    def charge(self, seconds: float) -> None:
        """Pay for what signals took, beside the steps too (records, metrics, detectors); below 0: income."""
        self._credit = max(self._credit - seconds, -self.share * _FORGIVEN_S)

    def _risky(self, rows: Sequence[Row], stride: int) -> list[Row]:
        """Rows that look risky, the riskiest first; the emptier the bucket, the more a row must."""
        if self._cost is None or self._credit <= 0:
            return []
        price, room = self._price(stride), self._room()
        most = min(self._credit, max(room / 4, price))  # of one step, so that it does not stretch too far
        chosen: list[Row] = []
        for row in sorted((row for row in rows if not row.full), key=lambda row: -row.risk):
            spent = len(chosen) * price
            wanted = max(RISKY, 1 - (self._credit - spent) / room)
            if row.risk < wanted or spent + price > most:
                break
            chosen.append(row)
        return chosen

    def _floor(self, rows: int, stride: int | None) -> tuple[int, int]:
        """Stride of the layers, and every how many tokens: the most that the floor's part of the income
        pays for, at most `RAREST`. `stride` says which layers it has to be.

        That part is a half; all of it while the bucket is full, so that nothing is left unused, and
        less in debt, so that what was spent is kept to whatever the estimates are worth.
        """
        if self._cost is None:
            return stride or self.strides[-1], 2 * COARSEST
        income = self.share * (self._step or 0.0) * (0.5 + 0.5 * self._fill())
        every, coarse = 1, stride or 1
        while every < RAREST and rows * self._price(coarse) > income * every:
            if stride is None and coarse <= every and coarse < self.strides[-1]:
                coarse *= 2
            else:
                every *= 2
        return coarse, every

    def _stride(self, wanted: int) -> int:
        return min(wanted, self.strides[-1])

    def _price(self, stride: int) -> float:
        """Seconds for a row with every `stride`-th layer and the last, on average over the offsets."""
        return (self._cost or 0.0) * (self.layers / stride + 1 - 1 / stride)

    def _room(self) -> float:
        """The most that can be saved: enough for one risky row, however dear."""
        return max(self.share * (self._step or 0.0) * _SAVED_STEPS, self._price(self._stride(8)))

    def _fill(self) -> float:
        """How full the bucket is, 1 at most; below 0 it is in debt."""
        room = self._room()
        return max(self._credit / room, -1.0) if room else 0.0


class _Deck:
    """Offsets below a stride in shuffled order, so that every layer has its turn and no response that
    is sampled at regular steps always meets the same ones."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._random = random.Random(stride)
        self._left: list[int] = []

    def deal(self) -> int:
        if not self._left:
            self._left = self._random.sample(range(self._stride), self._stride)
        return self._left.pop()


def _follow(mean: float | None, value: float) -> float:
    """Return the mean moved towards a new value: a sudden rise is believed slowly, a fall at once.

    Too low an estimate is paid for when the bill comes; one that is too high would not be mended, as
    nothing would be sampled.
    """
    if mean is None:
        return value
    if value < mean:
        return mean + 0.5 * (value - mean)
    return mean + 0.2 * (min(value, 4 * max(mean, 1e-6)) - mean)
