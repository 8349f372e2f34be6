"""Arrivals for the scheduler's simulation: generated once, with a seed, and kept in benchmarks/data.

    python -m benchmarks.arrivals

Nobody's traffic: Poisson arrivals whose rate changes as each trace says. Prompts are those of the
load scenario (`quaver load`), counted with the model's tokeniser, and one in ten is a long document of
400 … 1,600 tokens; answers are drawn log-normally around 48 tokens, at most 256. Time is in units of
the mean gap between arrivals of the trace, so that a simulation can set the load.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from chaos.prompts import stream
from engine.models import loader, store
from engine.settings import EngineSettings

DATA = Path(__file__).with_name("data") / "arrivals.json"
SEED = 16
COUNT = 320
MAX_TOKENS = 256

#: Rate over the share of the trace that has passed, relative to its mean.
SHAPES: dict[str, Callable[[float], float]] = {
    "steady": lambda _: 1.0,
    "bursts": lambda t: 4.0 if t * 8 % 1 < 0.15 else 0.5,
    "ramp": lambda t: 0.5 + 2.0 * t if t < 0.7 else 0.4,
}
#: Beside the steady tenant, another that floods the middle of the trace.
FLOOD = "flood"


def main() -> None:
    """Write the file."""
    settings = EngineSettings()
    tokenizer = loader.load_tokenizer(store.resolve(settings.model, settings.model_cache))
    prompts = [
        len(tokenizer.encode_prompt(tokenizer.chat(list(item.messages))))
        for item in islice(stream("demo", SEED), 200)
    ]
    traces = {name: _trace(name, shape, prompts) for name, shape in SHAPES.items()}
    rng = random.Random(f"{SEED}/{FLOOD}")
    small = [row for row in traces["steady"] if rng.random() < 0.25]
    flood = [[0.3 * COUNT + 0.4 * row[0], "flood", *row[2:]] for row in traces["steady"]]
    traces[FLOOD] = sorted([*small, *flood], key=lambda row: row[0])
    about = {"what": "generated, not recorded", "seed": SEED, "how": (__doc__ or "").split("\n\n")[2]}
    columns = ["time", "tenant", "prompt", "answer", "max_tokens"]
    DATA.parent.mkdir(exist_ok=True)
    lines = [f'"about": {json.dumps(about)}', f'"columns": {json.dumps(columns)}', '"traces": {']
    for name, trace in traces.items():
        rows = ",\n".join(map(json.dumps, trace))
        lines.append(f'"{name}": [\n{rows}\n]')
    text = "{" + ",\n".join(lines) + "\n}}\n"
    DATA.write_text(text.replace('"traces": {,', '"traces": {'))


def _trace(name: str, shape: Callable[[float], float], prompts: list[int]) -> list[list[float | str]]:
    """Arrivals by thinning, ended when time is over."""
    rng = random.Random(f"{SEED}/{name}")
    top = max(shape(i / 1000) for i in range(1000))
    mean = sum(shape(i / 1000) for i in range(1000)) / 1000
    rows: list[list[float | str]] = []
    now = 0.0
    while (now := now + rng.expovariate(top / mean)) < COUNT:
        if rng.random() < shape(now / COUNT) / top:
            long = rng.random() < 0.1
            prompt = rng.randint(400, 1600) if long else rng.choice(prompts)
            answer = min(max(round(rng.lognormvariate(3.87, 0.8)), 2), MAX_TOKENS)
            rows.append([round(now, 3), "steady", prompt, answer, MAX_TOKENS])
    return rows


if __name__ == "__main__":
    main()
