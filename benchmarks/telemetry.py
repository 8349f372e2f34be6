"""What one engine step costs the front: `python -m benchmarks.telemetry`.

Puts the front process together as `quaver serve` does and feeds it steps as the model process would
send them: decode, every observer (metrics, spans, records, detectors, chaos), delivery to the
requests' channels. Prints mean CPU milliseconds a step: on the event loop by part, and over all
threads, the records' writer included.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from engine.hooks import RequestStarted
from engine.messages import (
    HEAD_SIGNALS,
    TOKEN_SIGNALS,
    EngineStats,
    RequestMeta,
    StepOutput,
    decode_from_model,
    encode,
)
from engine.process.channel import Channel, deliver
from engine.process.client import notify
from quaver.service import Service
from quaver.settings import Settings

STEPS, WARM_UP = 2000, 200
STEP_S = 0.007  # time between steps, in the steps' own time
LAYERS, HEADS, STRIDE = 30, 9, 4


def step_of(index: int, rows: int, detail: int, source: np.random.Generator, now: float) -> bytes:
    """Encode a step as the model process does; `detail` of its `rows` have layer detail."""
    surprisal = source.gamma(0.5, 1.2, rows)
    signals = np.empty((rows, len(TOKEN_SIGNALS)), "<f4")
    signals[:] = np.stack(
        (
            surprisal,
            np.exp(-surprisal),
            source.random(rows),
            source.integers(1, 9, rows),
            source.gamma(1.5, 1.0, rows),
            surprisal,
            source.gamma(1.5, 1.0, rows),
        ),
        axis=1,
    )
    layers = sorted({*range(index % STRIDE, LAYERS, STRIDE), LAYERS - 1}) if detail else []
    return encode(
        StepOutput(
            step=index,
            time=now,
            duration_s=STEP_S,
            prefill_tokens=0,
            request_ids=[f"chatcmpl-{row:032x}" for row in range(rows)],
            choices=[0] * rows,
            steps=[index] * rows,
            token_ids=source.integers(0, 49152, rows, "<i4").tobytes(),
            signals=signals.tobytes(),
            layers=layers,
            layer_stride=STRIDE if detail else 0,
            heads_per_layer=HEADS,
            detail_rows=list(range(detail)),
            detail_reasons=["risk"] * detail,
            detail_rates=[1.0] * detail,
            detail_s=1e-4 * detail,
            lens_entropy=source.random((detail, len(layers))).astype("<f2").tobytes(),
            heads=source.random((detail, len(HEAD_SIGNALS), len(layers), HEADS)).astype("<f2").tobytes(),
            stats=EngineStats(running=rows, waiting=0, pages_used=10 * rows, pages_total=2048),
        )
    )


def started(request_id: str, now: float) -> RequestStarted:
    """Return the start of a streamed chat request."""
    return RequestStarted(
        meta=RequestMeta(request_id=request_id),
        time=now,
        endpoint="chat",
        stream=True,
        model="smollm2-135m",
        prompt_tokens=64,
        choices=1,
        max_tokens=STEPS,
        temperature=0.7,
        faults=[],
        prompt=None,
    )


def measure(rows: int, detail: int, folder: Path) -> dict[str, float]:
    """Return CPU milliseconds a step, by part."""
    service = Service(Settings(state_dir=folder, chaos=True))
    source, now = np.random.default_rng(1), time.time()
    keys = [f"chatcmpl-{row:032x}" for row in range(rows)]
    channels = {key: Channel(key, [0]) for key in keys}
    for key in keys:
        notify(service.client.observers, "on_started", started(key, now))
    messages = [step_of(i, rows, detail, source, now + i * STEP_S) for i in range(WARM_UP + STEPS)]
    parts = np.empty((WARM_UP + STEPS, 3))
    for i, message in enumerate(messages):
        if i == WARM_UP:
            whole = time.process_time()
        begun = time.thread_time()
        output = decode_from_model(message)
        decoded = time.thread_time()
        assert isinstance(output, StepOutput)
        notify(service.client.observers, "on_step", output)
        heard = time.thread_time()
        deliver(output, channels)
        parts[i] = decoded - begun, heard - decoded, time.thread_time() - heard
    service.telemetry.writer.flush(30)
    whole = time.process_time() - whole
    service.telemetry.close()
    decode, observe, handed = 1000 * parts[WARM_UP:].mean(axis=0)
    return {"decode": decode, "observe": observe, "deliver": handed, "all threads": 1000 * whole / STEPS}


def main() -> None:
    """Print the table."""
    print("rows  with detail   decode  observe  deliver  all threads   (CPU ms a step)")
    for rows, detail in ((1, 0), (1, 1), (16, 0), (16, 1), (16, 16)):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(rows, detail, Path(folder))
        print(f"{rows:4} {detail:12}" + "".join(f"{value:9.3f}" for value in found.values()))


if __name__ == "__main__":
    main()
