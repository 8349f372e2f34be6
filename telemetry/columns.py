"""Engine steps and request events turned into record batches of the schemas in `telemetry.record`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS, DetailReason, StepOutput
from telemetry.record import LAYERS, REQUESTS, TOKENS
from telemetry.signals import LayerBatch, TokenBatch

_RANK = TOKEN_SIGNALS.index("rank")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The arrays of one `StepOutput`, decoded once and shared by every reader (never written).

    `signals` float32 [rows, TOKEN_SIGNALS]; `lens_entropy` float16 [detail, layers]; `heads`
    float16 [detail, HEAD_SIGNALS, layers, heads]; `token_ids` int32 [rows], None unless content is
    captured.
    """

    step: int
    time: float
    request_ids: list[str]
    choices: list[int]
    steps: list[int]
    signals: NDArray[np.float32]
    token_ids: NDArray[np.int32] | None
    layers: list[int]
    layer_stride: int
    heads_per_layer: int
    detail_rows: list[int]
    detail_reasons: list[DetailReason]
    detail_rates: list[float]
    lens_entropy: NDArray[np.float16]
    heads: NDArray[np.float16]


def decode(output: StepOutput, capture: bool) -> Step:
    """View the byte columns of a step as arrays; raises ValueError when a size does not fit."""
    rows, detail = len(output.request_ids), len(output.detail_rows)
    shape = (detail, len(HEAD_SIGNALS), len(output.layers), output.heads_per_layer)
    return Step(
        step=output.step,
        time=output.time,
        request_ids=output.request_ids,
        choices=output.choices,
        steps=output.steps,
        signals=np.frombuffer(output.signals, "<f4").reshape(rows, len(TOKEN_SIGNALS)),
        token_ids=np.frombuffer(output.token_ids, "<i4") if capture else None,
        layers=output.layers,
        layer_stride=output.layer_stride,
        heads_per_layer=output.heads_per_layer,
        detail_rows=output.detail_rows,
        detail_reasons=output.detail_reasons,
        detail_rates=output.detail_rates,
        lens_entropy=np.frombuffer(output.lens_entropy, "<f2").reshape(detail, len(output.layers)),
        heads=np.frombuffer(output.heads, "<f2").reshape(shape),
    )


def keep(step: Step, rows: Sequence[int], without_layers: Set[int] = frozenset()) -> Step:
    """Return the step with some of its rows only; those of `without_layers` lose their layer detail."""
    place = {row: index for index, row in enumerate(rows)}
    detail = [
        index for index, row in enumerate(step.detail_rows) if row in place and row not in without_layers
    ]
    return msgspec.structs.replace(
        step,
        request_ids=[step.request_ids[row] for row in rows],
        choices=[step.choices[row] for row in rows],
        steps=[step.steps[row] for row in rows],
        signals=step.signals[list(rows)],
        token_ids=None if step.token_ids is None else step.token_ids[list(rows)],
        detail_rows=[place[step.detail_rows[index]] for index in detail],
        detail_reasons=[step.detail_reasons[index] for index in detail],
        detail_rates=[step.detail_rates[index] for index in detail],
        lens_entropy=step.lens_entropy[detail],
        heads=step.heads[detail],
    )


def token_batch(steps: Sequence[Step]) -> TokenBatch:
    """Return what a sink may know of the tokens of some steps: signals, never ids."""
    return TokenBatch(
        time=steps[-1].time,
        request_ids=[key for step in steps for key in step.request_ids],
        choices=[choice for step in steps for choice in step.choices],
        steps=[index for step in steps for index in step.steps],
        signals=np.concatenate([step.signals for step in steps]),
    )


def layer_batch(step: Step) -> LayerBatch:
    """Return the sampled layer detail of a step for the sinks."""
    return LayerBatch(
        time=step.time,
        request_ids=[step.request_ids[row] for row in step.detail_rows],
        choices=[step.choices[row] for row in step.detail_rows],
        steps=[step.steps[row] for row in step.detail_rows],
        layers=step.layers,
        stride=step.layer_stride,
        reasons=step.detail_reasons,
        rates=step.detail_rates,
        lens_entropy=step.lens_entropy,
        heads=step.heads,
    )


def tokens_batch(steps: Sequence[Step], text: Callable[[int], str | None] | None) -> pa.RecordBatch:
    """Return the `tokens` rows of some steps; `text` turns a token id into text (content capture)."""
    signals = np.concatenate([step.signals for step in steps])
    sizes = [len(step.request_ids) for step in steps]
    times = np.repeat(np.array([step.time for step in steps]) * 1e6, sizes).astype("M8[us]")
    rank = signals[:, _RANK]
    columns: dict[str, Any] = {
        "request_id": pa.array([key for step in steps for key in step.request_ids], pa.string()),
        "choice": pa.array([choice for step in steps for choice in step.choices], pa.int16()),
        "step": pa.array([index for step in steps for index in step.steps], pa.int32()),
        "time": pa.array(times, pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC")),
        "rank": pa.array(np.nan_to_num(rank).astype(np.int32), mask=np.isnan(rank)),
    }
    for column, name in enumerate(TOKEN_SIGNALS):
        if name != "rank":
            columns[name] = pa.array(np.ascontiguousarray(signals[:, column]), from_pandas=True)
    ids = [step.token_ids for step in steps if step.token_ids is not None]
    if ids and len(ids) == len(steps):
        flat = np.concatenate(ids)
        columns["token_id"] = pa.array(flat, pa.int32())
        if text is not None:
            columns["text"] = pa.array([text(token) for token in flat.tolist()], pa.string())
    return _batch(TOKENS, columns, len(rank))


def layers_batch(steps: Iterable[Step]) -> pa.RecordBatch | None:
    """Return the `layers` rows of some steps; None when no layer was sampled."""
    detailed = [step for step in steps if step.detail_rows]
    if not detailed:
        return None
    rows = [(step, row) for step in detailed for row in step.detail_rows]
    counts = [len(step.detail_rows) for step in detailed]
    depths = np.repeat([len(step.layers) for step in detailed], counts)
    heads = np.repeat([step.heads_per_layer for step in detailed], counts)
    layers = pa.array([layer for step, _ in rows for layer in step.layers], pa.int16())
    columns: dict[str, Any] = {
        "request_id": pa.array([step.request_ids[row] for step, row in rows], pa.string()),
        "choice": pa.array([step.choices[row] for step, row in rows], pa.int16()),
        "step": pa.array([step.steps[row] for step, row in rows], pa.int32()),
        "layers": pa.ListArray.from_arrays(_offsets(depths), layers),
        "heads": pa.array(heads, pa.int16()),
        "lens_entropy": _lists([step.lens_entropy for step in detailed], depths),
        "reason": pa.array([reason for step in detailed for reason in step.detail_reasons], pa.string()),
        "rate": pa.array([rate for step in detailed for rate in step.detail_rates], pa.float32()),
        "stride": pa.array(np.repeat([step.layer_stride for step in detailed], counts), pa.int16()),
    }
    for index, name in enumerate(HEAD_SIGNALS):
        columns[name] = _lists([step.heads[:, index] for step in detailed], depths * heads)
    return _batch(LAYERS, columns, len(rows))


def requests_batch(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Return the `requests` rows; NaN and infinities become null."""
    return pa.RecordBatch.from_pylist(
        [{key: finite(value) for key, value in row.items()} for row in rows], REQUESTS
    )


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, inside lists and dicts too (JSON has no word for them)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def _lists(parts: Sequence[NDArray[np.float16]], sizes: NDArray[np.int64]) -> pa.Array:
    """Lists of `sizes` [rows] values (not 0), NaN as null; a row of nothing but NaN is null itself."""
    flat = np.concatenate([part.ravel() for part in parts])
    absent = (flat.view(np.uint16) & 0x7FFF) > 0x7C00  # NaN, by its bits
    known = pa.py_buffer(np.packbits(~absent, bitorder="little"))
    values = pa.Array.from_buffers(pa.float16(), flat.size, [known, pa.py_buffer(flat)])
    nothing = np.logical_and.reduceat(absent, np.cumsum(sizes) - sizes)
    return pa.ListArray.from_arrays(_offsets(sizes), values, mask=pa.array(nothing))


def _offsets(sizes: NDArray[np.int64]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int32())


def _batch(schema: pa.Schema, columns: dict[str, Any], rows: int) -> pa.RecordBatch:
    arrays = [
        columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
