"""What model calls emitted, and the columns of a StepOutput that tell of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from engine.models.step import Floats, Ints, Output
from engine.scheduler import Sequence


@dataclass(slots=True)
class Emitted:
    """The tokens of one model call; row i of every array belongs to `sequences[i]`."""

    sequences: list[Sequence]
    output: Output
    tokens: Ints  # [rows]
    signals: Floats  # [rows, len(TOKEN_SIGNALS)]
    detailed: list[int]  # rows that have layer detail, in its order
    touched: dict[int, list[str]] = field(default_factory=dict)  # row -> faults that acted on it


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
    places: list[int] = []
    lens: list[np.ndarray] = []
    heads: list[np.ndarray] = []
    for offset, call in zip(_offsets(calls), calls, strict=True):
        detail = call.output.detail
        if detail is not None:
            places += [offset + i for i in call.detailed]
            lens.append(detail.lens_entropy.numpy().astype(np.float16))
            heads.append(detail.heads.numpy().astype(np.float16))
    if not places:
        return {}
    return {
        "detail_rows": places,
        "lens_entropy": np.concatenate(lens).tobytes(),
        "heads": np.concatenate(heads).tobytes(),
    }
