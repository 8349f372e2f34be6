"""What model calls emitted, and the columns of a StepOutput that tell of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from engine.budget import Sample
from engine.messages import DetailReason
from engine.models.step import Floats, Ints, LayerDetail, Output
from engine.scheduler import Sequence


@dataclass(slots=True)
class Emitted:
    """The tokens of one model call; row i of every array belongs to `sequences[i]`."""

    sequences: list[Sequence]
    output: Output
    tokens: Ints  # [rows]
    signals: Floats  # [rows, len(TOKEN_SIGNALS)]
    samples: dict[int, Sample]  # rows that have layer detail, in its order, and why
    touched: dict[int, list[str]] = field(default_factory=dict)  # row -> faults that acted on it
    detail_s: float = 0.0  # spent on detail so far


class Columns(TypedDict, total=False):
    """The columns of a StepOutput that tell of tokens."""

    request_ids: list[str]
    choices: list[int]
    steps: list[int]
    token_ids: bytes
    signals: bytes
    logprob_rows: list[int]
    logprob_ids: list[list[int]]
    logprobs: list[list[float]]
    detail_rows: list[int]
    detail_reasons: list[DetailReason]
    detail_rates: list[float]
    detail_s: float
    lens_entropy: bytes
    heads: bytes


def columns(calls: list[Emitted]) -> Columns:
    """Join the calls of a step; empty when nothing was emitted."""
    sequences = [s for call in calls for s in call.sequences]
    if not sequences:
        return {}
    found: Columns = {
        "request_ids": [s.key[0] for s in sequences],
        "choices": [s.key[1] for s in sequences],
        "steps": [s.emitted - 1 for s in sequences],
        "token_ids": np.concatenate([call.tokens for call in calls]).tobytes(),
        "signals": np.concatenate([call.signals for call in calls]).tobytes(),
    }
    return found | _logprobs(calls) | _detail(calls)


def _offsets(calls: list[Emitted]) -> list[int]:
    """Row of the step at which each call's rows begin."""
    return [sum(len(call.sequences) for call in calls[:i]) for i in range(len(calls))]


def _logprobs(calls: list[Emitted]) -> Columns:
    """Alternatives of the rows that asked for them, from the raw distribution."""
    places: list[int] = []
    ids: list[list[int]] = []
    values: list[list[float]] = []
    for offset, call in zip(_offsets(calls), calls, strict=True):
        for i, sequence in enumerate(call.sequences):
            count = sequence.request.params.top_logprobs
            if count:
                there = call.output.ids[i, :count] >= 0
                places.append(offset + i)
                ids.append(call.output.ids[i, :count][there].tolist())
                values.append((call.output.values[i, :count][there] - call.output.lse[i]).tolist())
    return {"logprob_rows": places, "logprob_ids": ids, "logprobs": values} if places else {}


def _detail(calls: list[Emitted]) -> Columns:
    began = time.perf_counter()
    places: list[int] = []
    samples: list[Sample] = []
    details: list[LayerDetail] = []
    for offset, call in zip(_offsets(calls), calls, strict=True):
        if call.output.detail is not None:
            places += [offset + i for i in call.samples]
            samples += call.samples.values()
            details.append(call.output.detail)
    if not details:
        return {}
    lens_entropy = _halves([detail.lens_entropy for detail in details])
    heads = _halves([detail.heads for detail in details])
    return {
        "detail_rows": places,
        "detail_reasons": [sample.reason for sample in samples],
        "detail_rates": [sample.rate for sample in samples],
        "detail_s": sum(call.detail_s for call in calls) + time.perf_counter() - began,
        "lens_entropy": lens_entropy,
        "heads": heads,
    }


def _halves(parts: list[Floats]) -> bytes:
    return np.concatenate([part.astype(np.float16) for part in parts]).tobytes()
