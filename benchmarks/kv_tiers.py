"""The KV tiers against computing everything again: `make bench-kv`, or

    python -m benchmarks.kv_tiers [--quick] [--only first_token,shared,…] [--output FILE]

With `--only`, what is measured takes its place beside the sections that the output file has already.
docs/performance.md tells what the figures mean.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import (
    kv_tiers_first_token,
    kv_tiers_overhead,
    kv_tiers_quality,
    kv_tiers_replay,
    kv_tiers_report,
    machine,
)
from benchmarks.engine import merged
from benchmarks.kv_tiers_drive import Engines
from benchmarks.rows import console
from benchmarks.text import Text
from engine.models import store
from engine.models.loader import load_tokenizer
from engine.settings import EngineSettings

OUTPUT = Path(__file__).parent / "results" / "kv_tiers.json"


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    first_token: kv_tiers_first_token.Plan
    replays: tuple[kv_tiers_replay.Plan, ...]
    overhead: kv_tiers_overhead.Plan
    quality: tuple[kv_tiers_quality.Window, ...]


WHOLE = Plan(
    kv_tiers_first_token.Plan(), kv_tiers_replay.WHOLE, kv_tiers_overhead.Plan(), kv_tiers_quality.WHOLE
)
QUICK = Plan(
    kv_tiers_first_token.QUICK, kv_tiers_replay.QUICK, kv_tiers_overhead.QUICK, kv_tiers_quality.QUICK
)
SECTIONS = ("first_token", "shared", "chat", "overhead", "quality")


def run(plan: Plan, *, threads: int, only: set[str], folder: Path) -> dict[str, Any]:
    """Measure the sections in `only`, with files in a folder of their own in `folder`."""
    began = time.monotonic()
    result = machine.describe()
    if result["machine"]["busy"] > machine.QUIET:
        console.print(f"[yellow]others use {result['machine']['busy']:.0%} of this machine: expect noise")
    torch.set_num_threads(threads)
    engines = Engines.load(threads)
    settings = EngineSettings()
    text = Text.read(load_tokenizer(store.resolve(settings.model, settings.model_cache)))
    gc.collect()
    gc.freeze()
    result |= {"engine": engines.about, "sections": sorted(only), "failed": {}}
    result |= dict.fromkeys(kv_tiers_report.TARGETS)

    def first_token(files: Path) -> None:
        found = kv_tiers_first_token.Measurement(engines, text, plan.first_token, files).run()
        result["first_token"] = found
        result.update(kv_tiers_first_token.ratios(found))

    def replay(files: Path, name: str) -> None:
        plans = [one for one in plan.replays if one.name == name]
        found = kv_tiers_replay.measure(engines, text, plans, files)
        result.update(found)
        result.update(kv_tiers_replay.ratios(found))

    def overhead(files: Path) -> None:
        found = kv_tiers_overhead.measure(engines, text, plan.overhead, files)
        result["overhead"] = found
        result.update(kv_tiers_overhead.ratios(found))

    def quality(_files: Path) -> None:
        found = kv_tiers_quality.measure(engines, text, plan.quality)
        result["quality"] = found
        result.update(kv_tiers_quality.ratios(found))

    sections: dict[str, Callable[[Path], None]] = {
        "quality": quality,
        "first_token": first_token,
        "shared": lambda files: replay(files, "shared"),
        "chat": lambda files: replay(files, "chat"),
        "overhead": overhead,
    }
    with torch.inference_mode():
        for name, section in sections.items():
            if name in only:
                with _files(folder) as files:
                    section(files)
    return result | {"seconds": round(time.monotonic() - began, 1)}


@contextlib.contextmanager
def _files(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quaver-bench-", dir=folder) as name:
        yield Path(name)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: few rounds, wide intervals")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--threads", type=int, default=EngineSettings().cores, help="of the model")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.home(),
        help="on the disk to measure; its files are deleted at the end",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    only = set(arguments.only.split(","))
    if only - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(only - set(SECTIONS)))}; there are {', '.join(SECTIONS)}")
    whole = only == set(SECTIONS)
    before = json.loads(arguments.output.read_text()) if not whole and arguments.output.exists() else {}
    plan = QUICK if arguments.quick else WHOLE
    result = run(plan, threads=arguments.threads, only=only, folder=arguments.folder)
    result = merged(before, result | {"quick": arguments.quick})
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    kv_tiers_report.show(result, Console())
    console.print(f"[dim]{arguments.output} written after {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
