"""Our engine beside its peers, in one run: `make bench`, or

    python -m benchmarks.engine [--quick] [--only prefill,decode,…] [--output benchmarks/results/engine.json]

Every engine runs in a process of its own with the same number of threads, and they take turns, round
by round. docs/performance.md tells what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import intervals, limits, machine, report, speed
from benchmarks.limits import Limits
from benchmarks.rows import Peers, Row, console
from benchmarks.text import Text
from benchmarks.variants import gather
from engine.models import store
from engine.models.config import ModelConfig
from engine.models.loader import load_config, load_tokenizer
from engine.settings import EngineSettings

SECTIONS = ("prefill", "decode", "signals", "memory", "quality", "http", "ready")
OUTPUT = Path(__file__).parent / "results" / "engine.json"


def run(*, threads: int, quick: bool, only: set[str]) -> dict[str, Any]:
    """Measure the sections in `only` and return everything, ready for JSON."""
    began = time.monotonic()
    settings = EngineSettings()
    model = store.pull("smollm2-135m", settings.model_cache)
    config, text = load_config(model), Text.read(load_tokenizer(model))
    plan = speed.QUICK if quick else speed.WHOLE
    field = gather(model)
    console.print("[dim]the machine's limits")
    allowed = limits.measure(threads)
    result: dict[str, Any] = machine.describe() | {
        "threads": threads,
        "quick": quick,
        "sections": [name for name in SECTIONS if name in only],
        "limits": asdict(allowed),
        "rows": [],
        "memory": {},
        "quality": {},
        "signals_overhead": {},
        "limit_share": {},
        "intervals": {},
    }
    result |= dict.fromkeys(report.TARGETS)
    found: list[Row] = []
    with Peers(threads) as peers:
        if "prefill" in only or "decode" in only:
            for variant in field.llamacpp:
                prompts = [text.prompt(512, number) for number in range(max(plan.steps))]
                peers.of(variant).ask("tune", prompts=prompts, batches=sorted(plan.steps))
        if "prefill" in only:
            found += speed.prefill(peers, [*field.ours, *field.llamacpp, field.plain], text, plan)
        if "decode" in only:
            everyone = [*field.ours, *field.llamacpp, field.plain, field.observing]
            found += speed.decode(peers, everyone, text, plan)
        _rate(found, peers, config, allowed, plan)
        result["rows"] = [{"name": row.variant.name} | row.as_dict() for row in found]
        result["limit_share"] = {row.key: row.limit_share for row in found}
        for name, interval in report.ratios(found).items():
            result[name] = interval.median
            result["intervals"][name] = asdict(interval)
        result["engines"] = peers.describe()
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def _rate(found: list[Row], peers: Peers, config: ModelConfig, allowed: Limits, plan: speed.Plan) -> None:
    """Set every row's share of what the machine allows."""
    for row in found:
        about = peers.of(row.variant).ask("describe")
        arithmetic = allowed.bf16 if row.variant.format == "bf16" else max(allowed.bf16, allowed.int8)
        if row.measure == "prefill":
            need, tokens = limits.prefill(config, about["weight_bytes"], row.size), row.size
        else:
            context = speed.context_of(row.size, plan)
            need, tokens = limits.decode(config, about["weight_bytes"], row.size, context), row.size
        row.limit_share = intervals.of(row.rounds).median * need.seconds(allowed, arithmetic) / tokens


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: few rounds, wide intervals")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    if only - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(only - set(SECTIONS)))}; there are {', '.join(SECTIONS)}")
    result = run(threads=arguments.threads, quick=arguments.quick, only=only)
    report.show(result, Console())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"[dim]{arguments.output} written after {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
