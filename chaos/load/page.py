"""The report of a run as one HTML page: no script, nothing fetched, light or dark as the reader has it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from chaos.load import plots
from chaos.load.report import Report
from chaos.load.slo import NAMES

_CSS = files("chaos.load").joinpath("page.css").read_text(encoding="utf-8")
ROWS = {
    "first_token_s": "first token",
    "inter_token_s": "between tokens",
    "per_output_token_s": "per output token",
    "end_to_end_s": "whole answer",
    "start_delay_s": "start delay",
    "cut_after_s": "left after",
    "failed_after_s": "failed after",
}
LATE_S = 0.2  # a start later than this makes the times of a run doubtful
COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")


def page(summary: Mapping[str, Any], report: Report) -> str:
    """Return the page of a run from its summary and the histograms behind it."""
    title = f"Load on {escape(summary['url'])}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_CSS}</style></head><body>"
        f"<header><h1>{title}</h1><p>{escape(_what(summary))}</p>{_state(summary)}</header>"
        f'<div class="tiles">{"".join(_tiles(summary))}</div>'
        f'<div class="plots">{"".join(_plots(summary, report))}</div>'
        f"{_times(summary)}{_ends(summary)}{_plan(summary)}</body></html>\n"
    )


def loop(plan: Mapping[str, Any]) -> str:
    """Say in words how requests came."""
    if plan["trace"]:
        return f"open loop, {plan['trace']} replayed at {plan['speed']:g} times its speed"
    if plan["burst_rate"]:
        burst = f"{plan['burst_rate']:g} a second in {plan['burst_s']:g} of every {plan['burst_every_s']:g} s"
        return f"open loop, {plan['rate']:g} requests a second, {burst}"
    if plan["rate"]:
        return f"open loop, {plan['rate']:g} requests a second"
    return f"closed loop, {plan['users']} users who ask again when they have read"


def _what(summary: Mapping[str, Any]) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary["started"]))
    return f"{began} · {loop(summary['plan'])} · seed {summary['plan']['seed']}"


def late(summary: Mapping[str, Any]) -> str | None:
    """Say that the load could not keep up with its own plan; None when nearly all was sent in time."""
    delay = summary["start_delay_s"]["p95"]
    if not summary["start_delay_s"]["count"] or delay <= LATE_S:
        return None
    return (
        f"The load fell behind: one request in twenty was sent {delay:.1f} s late or later. Times count from "
        f"when requests were due; for the rate that was asked for take more --at-once than "
        f"{summary['plan']['at_once']}, or a faster machine."
    )


def _state(summary: Mapping[str, Any]) -> str:
    notes = []
    if summary["state"] == "running":
        notes.append(
            "The run was going on when this was saved; a page that stays so is of a run that was killed."
        )
    elif summary["state"] != "finished":
        notes.append(f"The run did not come to its end: {summary['state']}.")
    if (behind := late(summary)) is not None:
        notes.append(behind)
    if summary["rows_lost"]:
        notes.append(f"{summary['rows_lost']} rows of requests.csv had no room on the disk.")
    return "".join(f'<p class="state">{escape(note)}</p>' for note in notes)


def _tiles(summary: Mapping[str, Any]) -> Iterable[str]:
    goodput, outcomes = summary["goodput"], summary["outcomes"]
    bad = outcomes.get("failed", 0) + outcomes.get("shed", 0)
    yield _tile(f"{summary['requests']:,}", f"requests in {summary['seconds']:.0f} s")
    yield _tile(_number(goodput["share"], "{:.1%}"), "good: read to the end, within the limits")
    yield _tile(_number(goodput["per_s"], "{:.3g}/s"), "goodput")
    yield _tile(_seconds(summary["first_token_s"]["p95"]), "first token, p95")
    yield _tile(_seconds(summary["inter_token_s"]["p95"]), "between tokens, p95")
    yield _tile(_number(summary["tokens_per_s"], "{:.3g}/s"), "tokens")
    yield _tile(f"{bad:,}", "failed or shed", bad=bad > 0)


def _plots(summary: Mapping[str, Any], report: Report) -> Iterable[str]:
    rows, width_s, limits = summary["timeline"], summary["bin_s"], report.slo.limits
    key = {"due": "", "sent": "k0", "read to the end": "k1"}
    yield _figure(
        "Requests a second", "what was due, what was sent", plots.rates(rows, width_s, "rates"), key
    )
    yield _figure(
        "First token over time",
        "by when the request was due",
        plots.latencies(rows, width_s, "first token over time", limits.get("ttft")),
        {"median to 95 %": "k0", "slowest": "k3"},
    )
    yield _figure(
        "How requests ended",
        "by when they ended",
        plots.ends(rows, width_s, "ends"),
        {"read": "k1", "left": "k2", "shed": "k3", "failed": "k4", "ended with the run": ""},
    )
    yield _figure(
        "The slow end",
        "time by percentile",
        plots.tail({ROWS[n]: report.times[n] for n in ("first_token_s", "end_to_end_s")}, "percentiles"),
        {"first token": "k0", "whole answer": "k1"},
    )
    for name, limit, note in (
        ("first_token_s", "ttft", "from the intended start"),
        ("inter_token_s", None, "one count a token"),
        ("end_to_end_s", "e2e", "from the intended start, answers read to their end"),
        ("start_delay_s", None, "how late the client was; large ones make the others doubtful"),
    ):
        drawn = plots.spread(report.times[name], ROWS[name], limits.get(limit or ""))
        yield _figure(ROWS[name].capitalize(), note, drawn)


def _times(summary: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    lines = (
        f"<tr><td>{what}</td>"
        + "".join(
            f"<td>{summary[n][c]:,}</td>" if c == "count" else f"<td>{_seconds(summary[n][c])}</td>"
            for c in COLUMNS
        )
        + "</tr>"
        for n, what in ROWS.items()
    )
    return f'<h2>Times</h2><div class="wide"><table><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'


def _ends(summary: Mapping[str, Any]) -> str:
    groups = {
        "outcome": summary["outcomes"],
        "left because": summary["left_because"],
        "shed because": summary["shed_because"],
        "failed because": summary["errors"],
        "not good because": summary["goodput"]["missed"],
    }
    early = {"left before a first token, so without a first-token time": summary["left_before_first_token"]}
    lines = [
        f"<tr><td>{what}: {escape(str(why))}</td><td>{count:,}</td></tr>"
        for what, counts in groups.items()
        for why, count in counts.items()
    ]
    lines += [f"<tr><td>{what}</td><td>{count:,}</td></tr>" for what, count in early.items() if count]
    table = "".join(lines) or "<tr><td>no request ended</td><td></td></tr>"
    return f'<h2>Ends</h2><div class="wide"><table><tr><th></th><th>requests</th></tr>{table}</table></div>'


def _plan(summary: Mapping[str, Any]) -> str:
    limits = [(f"limit {n}", f"{limit:g} s: {NAMES[n]}") for n, limit in summary["goodput"]["slo"].items()]
    aside = {"trace", "speed"} if not summary["plan"]["trace"] else set()
    aside |= {"burst_s", "burst_every_s"} if not summary["plan"]["burst_rate"] else set()
    aside |= {"users"} if summary["plan"]["rate"] or summary["plan"]["trace"] else {"at_once"}
    given = [(n, value) for n, value in summary["plan"].items() if value not in ("", 0) and n not in aside]
    lines = (f"<tr><td>{escape(n)}</td><td>{escape(str(v))}</td></tr>" for n, v in (*limits, *given))
    return f'<h2>Plan</h2><div class="wide"><table>{"".join(lines)}</table></div>'


def _tile(value: str, what: str, *, bad: bool = False) -> str:
    return f'<div class="tile{" bad" if bad else ""}"><b>{value}</b><span>{what}</span></div>'


def _figure(title: str, note: str, drawn: str, key: Mapping[str, str] | None = None) -> str:
    names = "".join(f'<span><i class="{colour}"></i>{name}</span>' for name, colour in (key or {}).items())
    legend = f'<div class="key">{names}</div>' if names else ""
    return f"<figure><figcaption>{title}<small>{note}</small></figcaption>{legend}{drawn}</figure>"


def _seconds(value: float | None) -> str:
    return _number(value, "{:.3f} s")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
