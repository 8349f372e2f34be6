"""From rows to the figures that the issue asks for, and the table that people read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import intervals
from benchmarks.rows import Row

#: Every figure, what it is against, and what to reach: at least, and the aim. Ratios of throughput are
#: better when larger; shares lost, deltas and seconds are better when smaller.
TARGETS: dict[str, tuple[str, float | None, float | None]] = {
    "prefill_512_vs_llamacpp": ("llama.cpp's fastest format", 1.5, 3.0),
    "decode_1_8bit_vs_q8_0": ("llama.cpp Q8_0", 1.0, 1.2),
    "decode_1_4bit_vs_q4_0": ("llama.cpp Q4_0", 0.8, 1.2),
    "decode_16_vs_llamacpp": ("llama.cpp's fastest format", 1.3, 2.5),
    "signals_overhead_upper95": ("signals off, the worst batch's upper bound", 0.05, 0.01),
    "full_signals_vs_transformers": ("transformers doing the same, batch 1", 4.0, 8.0),
    "perplexity_delta": ("float32, less bf16's own", 0.01, None),
    "top1_delta": ("float32, less bf16's own", 0.02, None),
    "http_overhead": ("the bare engine, 16 streams", 0.15, 0.05),
    "ready_s": ("start to ready", 5.0, 2.0),
}
_LARGER_IS_BETTER = {name for name in TARGETS if "_vs_" in name}


def ratios(rows: list[Row]) -> dict[str, intervals.Interval]:
    """Return the figures that compare rows of one run, those whose rows there are. Signals at the
    default budget, unless a figure says otherwise; where no format is named, each side's fastest."""
    ours = [row for row in rows if row.variant.family == "ours" and row.variant.signals == "budget"]
    full = [row for row in rows if row.variant.family == "ours" and row.variant.signals == "full"]
    llamacpp = [row for row in rows if row.variant.family == "llama.cpp"]
    observing = [row for row in rows if row.variant.family == "transformers" and row.variant.signals]
    pairs = {
        "prefill_512_vs_llamacpp": (_find(ours, "prefill", 512), _find(llamacpp, "prefill", 512)),
        "decode_1_8bit_vs_q8_0": (_find(ours, "decode", 1, "8-bit"), _find(llamacpp, "decode", 1, "Q8_0")),
        "decode_1_4bit_vs_q4_0": (_find(ours, "decode", 1, "4-bit"), _find(llamacpp, "decode", 1, "Q4_0")),
        "decode_16_vs_llamacpp": (_find(ours, "decode", 16), _find(llamacpp, "decode", 16)),
        "full_signals_vs_transformers": (_find(full, "decode", 1), _find(observing, "decode", 1)),
    }
    return {
        name: intervals.ratio(mine.rounds, theirs.rounds)
        for name, (mine, theirs) in pairs.items()
        if mine is not None and theirs is not None
    }


def _find(rows: Iterable[Row], measure: str, size: int, format: str | None = None) -> Row | None:
    """The fastest of the rows that match, or None."""
    found = [r for r in rows if (r.measure, r.size) == (measure, size) and format in (None, r.variant.format)]
    return max(found, key=lambda row: intervals.of(row.rounds).median, default=None)


def show(result: dict[str, Any], console: Console) -> None:
    """Print what was measured."""
    for measure in ("prefill", "decode"):
        rows = [row for row in result["rows"] if row["measure"] == measure]
        if rows:
            console.print(_speeds(rows, measure))
    if result["memory_mb"]:
        console.print(_memory(result["memory_mb"]))
    if result["quality"]:
        console.print(_quality(result["quality"]))
    for batch, cost in result["signals"].items():
        console.print(
            f"signals at the default budget, {batch}: {cost['median']:.1%} of throughput "
            f"(95 % sure: at most {cost['upper95']:.1%}, {len(cost['losses'])} pairs)"
        )
    if result["http"]:
        found = result["http"]
        console.print(
            f"16 streams over HTTP: {intervals.of(found['streamed_tokens_per_s']).median:,.0f} tokens/s, "
            f"the engine alone {intervals.of(found['engine_tokens_per_s']).median:,.0f}; "
            f"the client takes {found['client_share_of_all_cores']:.1%} of all cores"
        )
    console.print(figures(result, TARGETS))


def _speeds(rows: list[dict[str, Any]], measure: str) -> Table:
    sizes = sorted({row["size"] for row in rows})
    table = Table(title=f"{measure}, tokens/s (share of the machine's limit)", title_justify="left")
    table.add_column("engine")
    for size in sizes:
        table.add_column(f"{size} tokens" if measure == "prefill" else f"batch {size}", justify="right")
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        share = "" if row["limit_share"] is None else f" ({row['limit_share']:.0%})"
        cells.setdefault(row["name"], {})[row["size"]] = f"{row['tokens_per_s']:,.0f}{share}"
    for name, figures in cells.items():
        table.add_row(name, *(figures.get(size, "–") for size in sizes))
    return table


def _memory(memory: dict[str, float]) -> Table:
    table = Table(title="resident memory after 512 tokens of prompt and a batch of 16", title_justify="left")
    table.add_column("engine")
    table.add_column("MB", justify="right")
    for name, megabytes in memory.items():
        table.add_row(name, f"{megabytes:,.0f}")
    return table


def _quality(quality: dict[str, dict[str, float]]) -> Table:
    table = Table(title="quality against float32", title_justify="left")
    for column in ("weights", "perplexity", "perplexity + %", "other top-1 %"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for name, found in quality.items():
        table.add_row(
            name,
            f"{found['perplexity']:.3f}",
            f"{100 * (found['perplexity_ratio'] - 1):+.2f}",
            f"{100 * found['top1_disagreement']:.2f}",
        )
    return table


def figures(result: dict[str, Any], targets: Mapping[str, tuple[str, float | None, float | None]]) -> Table:
    """Return the table of the figures in `targets`, coloured by what they reach."""
    table = Table(title="to reach", title_justify="left")
    for column in ("figure", "against", "here", "at least", "aim"):
        table.add_column(column, justify="left" if column in ("figure", "against") else "right")
    for name, (against, least, aim) in targets.items():
        here = result[name]
        if here is None:
            table.add_row(name, against, "–", _short(least), _short(aim))
            continue
        larger = name in _LARGER_IS_BETTER
        reached = least is None or (here >= least if larger else here <= least)
        aimed = aim is not None and (here >= aim if larger else here <= aim)
        colour = "green" if aimed else "cyan" if reached else "red"
        table.add_row(name, against, f"[{colour}]{here:.3f}", _short(least), _short(aim))
    return table


def _short(figure: float | None) -> str:
    return "" if figure is None else f"{figure:g}"
