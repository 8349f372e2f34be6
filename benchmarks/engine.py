"""Our engine beside its peers, in one run: `make bench`, or

    python -m benchmarks.engine [--quick] [--only prefill,decode,…] [--output benchmarks/results/engine.json]

With `--only`, what is measured takes its place beside the sections that the output file has already.

Every engine runs in a process of its own with the same number of threads, and they take turns, round
by round. docs/performance.md tells what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import intervals, limits, machine, memory, quality, report, serving, speed
from benchmarks.limits import Limits
from benchmarks.peers.process import PeerError
from benchmarks.rows import Peers, Row, console
from benchmarks.text import Text
from benchmarks.variants import Field, gather
from engine.models import store
from engine.models.config import ModelConfig
from engine.models.loader import load_config, load_tokenizer
from engine.settings import EngineSettings

SECTIONS = ("prefill", "decode", "signals", "memory", "quality", "http", "ready")
OUTPUT = Path(__file__).parent / "results" / "engine.json"


class Run:
    """One measurement. Every section fills its part of `result`, which is ready for JSON."""

    def __init__(self, peers: Peers, plan: speed.Plan) -> None:
        model = store.pull("smollm2-135m", EngineSettings().model_cache)
        self.config: ModelConfig = load_config(model)
        self.text = Text.read(load_tokenizer(model))
        self.field: Field = gather(model)
        self.peers, self.plan = peers, plan
        about = machine.describe()
        if about["machine"]["busy"] > machine.QUIET:
            console.print(f"[yellow]others use {about['machine']['busy']:.0%} of this machine: expect noise")
        console.print("[dim]the machine's limits")
        self.limits: Limits = limits.measure(peers.threads)
        self.result: dict[str, Any] = about | {
            "threads": peers.threads,
            "limits": asdict(self.limits),
            "rows": [],
            "memory_mb": {},
            "quality": {},
            "signals": {},
            "http": None,
            "ready": None,
            "intervals": {},
            "limit_share": {},
            "failed": {},
        }
        self.result |= dict.fromkeys(report.TARGETS)

    def attempt(self, name: str, section: Callable[[], None]) -> None:
        """Measure a section; an engine that fails leaves its figures empty and the others their turn."""
        try:
            section()
        except PeerError as error:
            console.print(f"{name} failed: {error}", markup=False, style="red")
            self.result["failed"][name] = str(error)

    def speeds(self, measures: set[str]) -> None:
        """Prompts and decodes, and the figures that compare them."""
        field, rows = self.field, []
        self._tune()
        if "prefill" in measures:
            everyone = [*field.ours, *field.llamacpp, field.plain]
            rows += speed.prefill(self.peers, everyone, self.text, self.plan)
        if "decode" in measures:
            everyone = [*field.ours, *field.llamacpp, field.plain, field.observing]
            rows += speed.decode(self.peers, everyone, self.text, self.plan)
        self._rate(rows)
        self.result["rows"] = [{"name": row.variant.name} | row.as_dict() for row in rows]
        self.result["limit_share"] = {row.key: row.limit_share for row in rows}
        for name, interval in report.ratios(rows).items():
            self.result[name] = interval.median
            self.result["intervals"][name] = asdict(interval)

    def signals(self) -> None:
        """What the default budget costs: the worst of one sequence and of many."""
        bounds = []
        for batch in self.plan.answers:
            pair = self.field.ours_with("off")[0], self.field.ours_with("budget")[0]
            losses = speed.signals_cost(self.peers, pair, self.text, self.plan, batch)
            found = intervals.of(losses)
            self.result["signals"][f"batch {batch}"] = asdict(found) | {"losses": losses}
            bounds.append(found.upper95)
        self.result["signals_overhead_upper95"] = max(bounds)

    def memory(self) -> None:
        """Resident memory of each engine in a fresh process."""
        everyone = [*self.field.ours_with("budget"), *self.field.llamacpp, self.field.plain]
        self.result["memory_mb"] = memory.measure(self.peers, everyone, self.text)

    def quality(self, windows: int) -> None:
        """Perplexity and likeliest tokens against float32."""
        field = self.field
        asked: list[quality.Asked] = [(quality.FLOOR, field.bfloat16, {"path": "prefill"})]
        for variant in field.ours_with("off"):
            for path in ("prefill", "decode"):
                asked.append((f"ours {variant.format}, {path}", variant, {"path": path}))
        asked += [(variant.name, variant, {}) for variant in (*field.llamacpp, field.plain)]
        found = quality.judge(self.peers, field.float32, asked, self.text, windows)
        self.result["quality"] = found
        self.result |= quality.deltas(found)

    def http(self, rounds: int, tokens: int) -> None:
        """What a real server loses against the engine alone."""
        found = serving.overhead(self.peers, self.field.default, self.text, rounds, tokens)
        self.result["http"], self.result["http_overhead"] = found, found["overhead"]

    def ready(self, times: int) -> None:
        """How long a start takes."""
        seconds = serving.starts(self.peers.threads, times)
        self.result["ready"], self.result["ready_s"] = seconds, intervals.of(seconds).median

    def _tune(self) -> None:
        prompts = [self.text.prompt(512, number) for number in range(16)]
        for variant in self.field.llamacpp:
            console.print(f"[dim]the fastest configuration of {variant.name}")
            self.peers.of(variant).ask("tune", prompts=prompts, batches=[1, 16])

    def _rate(self, rows: list[Row]) -> None:
        """Set every row's share of what the machine allows, measured before and after."""
        self.limits = self.limits.best_of(limits.measure(self.peers.threads))
        self.result["limits"] = asdict(self.limits)
        for row in rows:
            weights = self.peers.of(row.variant).ask("describe")["weight_bytes"]
            fastest = self.limits.bf16 if row.variant.format.lower() == "bf16" else self.limits.fastest
            if row.measure == "prefill":
                need = limits.prefill(self.config, weights, row.size)
            else:
                context = speed.context_of(row.size, self.plan)
                need = limits.decode(self.config, weights, row.size, context)
            least = need.seconds(self.limits, fastest)
            row.limit_share = intervals.of(row.rounds).median * least / row.size


def run(*, threads: int, quick: bool, only: set[str], rounds: int | None = None) -> dict[str, Any]:
    """Measure the sections in `only` and return everything, `failed` with what failed and why."""
    began = time.monotonic()
    plan = speed.QUICK if quick else speed.WHOLE
    with Peers(threads) as peers:
        measured = Run(peers, plan if rounds is None else replace(plan, rounds=rounds))
        sections: dict[str, Callable[[], None]] = {
            "ready": lambda: measured.ready(3 if quick else 5),
            "prefill,decode": lambda: measured.speeds(only),
            "signals": measured.signals,
            "http": lambda: measured.http(*(1, 48) if quick else (10, 96)),
            "quality": lambda: measured.quality(2 if quick else 14),
            "memory": measured.memory,
        }
        for name, measure in sections.items():
            if only & set(name.split(",")):
                measured.attempt(name, measure)
        about = {"quick": quick, "sections": sorted(only), "engines": peers.describe()}
    return measured.result | about | {"seconds": round(time.monotonic() - began, 1)}


def merged(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Put what was measured in place of what an earlier run found; `measured` says when for each section."""
    when = [result["date"], result["commit"]]
    measured = before.get("measured", {}) | dict.fromkeys(result["sections"], when)
    found = {key: value for key, value in result.items() if value not in (None, [], {}) or key not in before}
    return before | found | {"failed": result["failed"], "measured": measured, "sections": sorted(measured)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: few rounds, wide intervals")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--threads", type=int, default=2, help="of every engine")
    parser.add_argument("--rounds", type=int, help="of prefill and decode")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    if only - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(only - set(SECTIONS)))}; there are {', '.join(SECTIONS)}")
    before = (
        json.loads(arguments.output.read_text())
        if only != set(SECTIONS) and arguments.output.exists()
        else {}
    )
    result = run(threads=arguments.threads, quick=arguments.quick, only=only, rounds=arguments.rounds)
    result = merged(before, result)
    report.show(result, Console())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"[dim]{arguments.output} written after {result['seconds']:.0f} s")
    if result["failed"]:
        raise SystemExit(f"failed: {', '.join(result['failed'])}")


if __name__ == "__main__":
    main()
