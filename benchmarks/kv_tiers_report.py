"""The tables that people read."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import figures

#: Every figure, what it is against, and what to reach: at least, and the aim. All are better when smaller.
TARGETS: dict[str, tuple[str, float | None, float | None]] = {
    "device_hit_ratio_4k": ("first token, cold", 0.03, 0.01),
    "host_hit_ratio_4k": ("first token, cold", 0.10, 0.04),
    "disk_hit_ratio_4k": ("first token, cold", 0.20, 0.08),
    "host_bytes_ratio": ("bytes in the page pool", 0.53, None),
    "disk_bytes_ratio": ("bytes in the page pool", None, None),
    "disk_bytes_ratio_dropping": ("bytes in the page pool", 0.35, None),
    "host_perplexity_delta": ("pages that stay, the worst window", 0.005, None),
    "shared_prompt_p95_ratio": ("8 clients, pages alone", 0.37, 0.15),
    "no_reuse_overhead_upper95": ("nothing kept, the worst upper bound", 0.03, 0.01),
}


def show(result: dict[str, Any], console: Console) -> None:
    """Print what was measured."""
    if found := result.get("first_token"):
        console.print(_first_token(found))
    for name in ("shared", "chat"):
        if found := result.get(name):
            console.print(_replay(name, found))
    if found := result.get("overhead"):
        console.print(_overhead(found))
    if found := result.get("quality"):
        console.print(_quality(found))
    console.print(figures(result, TARGETS))


def _first_token(found: dict[str, Any]) -> Table:
    table = Table(
        title=f"first token, ms (÷ cold); files are read {found['files_are_read']}", title_justify="left"
    )
    for column in ("tokens", "cold", "device", "host", "disk", "restart"):
        table.add_column(column, justify="right")
    for size, row in found["sizes"].items():
        cells = [f"{hit['ms']:.0f} ({hit['ratio']['median']:.1%})" for hit in row["hits"].values()]
        table.add_row(size, f"{row['cold_ms']:.0f}", *cells)
    return table


def _replay(name: str, found: dict[str, Any]) -> Table:
    table = Table(title=f"{name} prompts: first token and throughput", title_justify="left")
    for column in (
        "clients",
        "kept",
        "p50 ms",
        "p95 ms",
        "gap p50, p95",
        "tokens/s",
        "device",
        "host",
        "disk",
        "p95 with tiers ÷",
    ):
        table.add_column(column, justify="left" if column == "kept" else "right")
    for clients, one in found["clients"].items():
        for arm, row in one["arms"].items():
            ratio = one["p95_ratio"].get(arm)
            table.add_row(
                clients,
                arm,
                f"{row['p50_ms']:.0f}",
                f"{row['p95_ms']:.0f}",
                f"{row['gap_p50_ms']:.0f}, {row['gap_p95_ms']:.0f}",
                f"{row['tokens_per_s']:.0f}",
                *(f"{row['hit_ratio'][tier]:.0%}" for tier in ("device", "host", "disk")),
                "" if ratio is None else f"{ratio['median']:.2f} (≤ {ratio['upper95']:.2f})",
            )
    return table


def _overhead(found: dict[str, Any]) -> Table:
    table = Table(title="tokens/s lost where nothing is reused", title_justify="left")
    for column in ("kept, requests", "median", "95 % sure: at most", "at first", "at most"):
        table.add_column(column, justify="left" if "," in column else "right")
    for name, row in found.items():
        cells = [f"{part[key]:.1%}" for part in (row, row["at_first"]) for key in ("median", "upper95")]
        table.add_row(name, *cells)
    return table


def _quality(found: dict[str, Any]) -> Table:
    table = Table(title="after a round trip through a tier", title_justify="left")
    for column in (
        "stored",
        "perplexity + %",
        "at most",
        "same top-1 %",
        "tokens",
        "host bytes",
        "disk bytes",
    ):
        table.add_column(column, justify="left" if column == "stored" else "right")
    for kind in ("without dropping", "with dropping"):
        for window, row in (found.get(kind) or {}).items():
            table.add_row(
                f"{window}, {kind}",
                f"{100 * row['perplexity_delta']:+.3f}",
                f"{100 * row['upper95']:+.3f}",
                f"{100 * row['top1_agreement']:.2f}",
                str(row["tokens"]),
                *(f"{row[f'{tier}_bytes_ratio']:.3f}" for tier in ("host", "disk")),
            )
    return table
