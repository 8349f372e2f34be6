"""What a step of the real engine costs, as a formula fitted to measured steps.

seconds = fixed + decode · d + prompt · p + attention · Σ context, where d are decodes, p prompt tokens and
the sum goes over every token computed. Non-negative least squares on relative error; `spread` is the
standard deviation of the logarithm of measured ÷ fitted.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from engine.core import Engine, load_engine
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.scheduler import Chunk
from engine.settings import EngineSettings

_WARM = 5  # the first steps allocate, and unpack weights
TERMS = ("fixed", "decode", "prompt", "attention")


def terms(chunks: list[Chunk]) -> list[float]:
    """Return what the formula multiplies, in the order of TERMS."""
    decodes = sum(chunk.start >= chunk.sequence.prompt_length for chunk in chunks)
    tokens = sum(chunk.count for chunk in chunks)
    context = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in chunks)
    return [1.0, float(decodes), float(tokens - decodes), context]


def measure(seconds: float = 40.0) -> dict[str, Any]:
    """Run the engine on a mixture of batch sizes, prompts and contexts and fit the formula."""
    settings = EngineSettings(itl_slo_ms=0)
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    engine = load_engine(settings)
    rows: list[list[float]] = []
    times: list[float] = []
    rng = random.Random(16)
    spent, number = 0.0, 0
    while spent < seconds:
        for _ in range(rng.choice([1, 2, 4, 8, 16])):
            number += 1
            _submit(engine, f"r{number}", rng.choice([8, 30, 60, 120, 300, 700, 1200]), rng)
        while engine.has_work and spent < seconds:
            row, took = _step(engine)
            rows.append(row)
            times.append(took)
            spent += took if len(rows) > _WARM else 0.0
    x, y = np.array(rows[_WARM:]), np.array(times[_WARM:])
    scale = np.abs(x).max(axis=0)
    found, _ = nnls(x / scale / y[:, None], np.ones(len(y)))
    cost = found / scale
    ratio = np.log(y / (x @ cost))
    return {
        "constants": dict(zip(TERMS, cost.tolist(), strict=True)),
        "spread": float(ratio.std()),
        "steps": len(y),
        "model": settings.model,
        "backend": engine.ready().backend,
        "dtype": engine.ready().dtype,
        "threads": torch.get_num_threads(),
    }


def _submit(engine: Engine, request_id: str, prompt: int, rng: random.Random) -> None:
    tokens = [rng.randrange(5, engine.model.config.vocab) for _ in range(prompt)]
    params = SamplingParams(max_tokens=rng.choice([2, 6, 12]), ignore_eos=True)
    engine.submit(Submit(meta=RequestMeta(request_id=request_id), token_ids=tokens, params=params))


def _step(engine: Engine) -> tuple[list[float], float]:
    """Step, and return the terms of what was computed with the seconds it took."""
    planned: list[Chunk] = []
    original = engine.roster.learn

    def note(chunks: list[Chunk], _seconds: float) -> None:
        planned.extend(chunks)

    engine.roster.learn = note  # type: ignore[method-assign]
    output = engine.step()
    engine.roster.learn = original  # type: ignore[method-assign]
    return terms(planned), output.duration_s


def seconds_of(cost: dict[str, Any], chunks: list[Chunk], rng: random.Random) -> float:
    """Draw the time of a step from the formula."""
    mean = sum(cost["constants"][name] * value for name, value in zip(TERMS, terms(chunks), strict=True))
    return mean * math.exp(rng.gauss(0.0, cost["spread"]))
