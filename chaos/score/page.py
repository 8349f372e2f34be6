"""The card as one HTML page: no script, nothing fetched, light or dark as the reader has it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

_CSS = files("chaos.score").joinpath("page.css").read_text(encoding="utf-8")
_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 1000, 300, 20, 46, 24
_LOW, _HIGH = 0.3, 1.0
_SEEN_BY = {"passive": "passive signals", "tap": "with the tap behind the sampler", "canary": "canaries"}


def page(card: Mapping[str, Any]) -> str:
    """Return the page of a card."""
    made = card["made"]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(made["started"]))
    what = (
        f"{when} · {made['model']} · temperature {made['temperature']} · {made['sizes']['n']} answers a cell"
    )
    key = "".join(f'<i style="background: var(--{name})"></i>{text}' for name, text in _SEEN_BY.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Scorecard</title><style>{_CSS}</style></head><body>"
        f"<header><h1>Scorecard</h1><p>{escape(what)}</p></header>"
        f'<div class="tiles">{"".join(_tiles(card))}</div>'
        "<h2>What sees each fault</h2><p>The chance that a struck answer looks more suspicious than a "
        "healthy one to the same kind of prompt (AUROC): 1 always, ½ a coin. Lines are 95 % intervals over "
        "families of prompts; ticks are what each has to reach.</p>"
        f'<p class="key">{key}</p><div class="wide">{_forest(card["faults"])}</div>'
        f"<h2>Harm, and how fast somebody is paged</h2>{_harm(card['faults'])}"
        f"<h2>Beside what others use</h2>{_peers(card)}"
        "<p>Passive signals see hesitation. An answer that is wrong and sure of itself, as after an invented "
        "authority, does not hesitate: only a prompt whose answer is known tells.</p></body></html>\n"
    )


def _tiles(card: Mapping[str, Any]) -> Iterable[str]:
    clean, resilience = card["clean"], card["resilience"]
    yield _tile(_share(resilience), "of the harm comes from faults that page")
    yield _tile(
        f"{clean['paged']}", f"pages in {clean['responses']:,} healthy responses", bad=clean["paged"] > 1
    )
    yield _tile(f"1 in {1 / clean['upper95']:,.0f}", "responses: false pages are rarer, with 95 % confidence")
    length, wanted = clean["run_length"]["resampled"], clean["run_length"]["wanted"]
    yield _tile(
        f"over {length['ci'][0]:,.0f}",
        f"healthy responses between false pages by simulation, 95 % confidence; {wanted:,.0f} are promised",
        bad=length["value"] is not None and length["value"] < wanted,
    )
    yield _tile(_share(clean["fpr"]["value"]), "of healthy answers pass the 5 % limit")
    nothing = card["blind"]["found_nothing"]
    yield _tile("nothing" if nothing else "something", "found with shuffled labels", bad=not nothing)


def _tile(value: str, text: str, *, bad: bool = False) -> str:
    return f'<div class="tile"><b{" class=bad" if bad else ""}>{value}</b><span>{text}</span></div>'


def _forest(faults: Mapping[str, Mapping[str, Any]]) -> str:
    height = _TOP + _ROW * len(faults) + 24
    ticks = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    parts = [
        _line("grid", _x(v), _TOP - 6, _x(v), height - 22)
        + f'<text class="soft" text-anchor="middle" x="{_x(v):.1f}" y="{height - 6}">{v:g}</text>'
        for v in ticks
    ]
    for place, fault in enumerate(faults.values()):
        middle = _TOP + _ROW * place + _ROW / 2
        parts.append(f'<text x="0" y="{middle + 4:.1f}">{escape(fault["title"])}</text>')
        for number, name in enumerate(_SEEN_BY):
            least = fault["target"]["passive" if name == "passive" else "probed"]
            parts.append(_mark(fault[name], name, middle + (number - 1) * 12, least))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="AUROC by fault">{"".join(parts)}</svg>'
    )


def _mark(seen: Mapping[str, Any], name: str, y: float, least: float | None) -> str:
    if seen["auroc"] is None:
        return ""
    (low, high), value = seen["ci"], seen["auroc"]
    tick = ""
    if least is not None:
        tick = _line("target", _x(least), y - 5, _x(least), y + 5)
    return (
        _line(name, _x(low), y, _x(high), y)
        + f'<circle class="{name}" cx="{_x(value):.1f}" cy="{y:.1f}" r="4.5">'
        f"<title>{_SEEN_BY[name]}: {value:.2f} ({low:.2f} to {high:.2f})</title></circle>{tick}"
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _x(value: float) -> float:
    inside = min(max(value, _LOW), _HIGH)
    return _LEFT + (inside - _LOW) / (_HIGH - _LOW) * (_WIDTH - _LEFT - _RIGHT)


def _harm(faults: Mapping[str, Mapping[str, Any]]) -> str:
    head = (
        "",
        "right answers<br>healthy → struck",
        "caught at<br>the 5 % limit",
        "control passes<br>that limit",
        "responses<br>to the page",
        "orders<br>without one",
        "responses<br>until it ends",
        "canaries<br>to the page",
        "control fires<br>canaries",
        "cause named<br>right, wrong",
    )
    lines = []
    for fault in faults.values():
        control = fault["fpr_numeric"] or fault["fpr_semantic"]
        accuracy, target = fault["accuracy"], fault["target"]
        lines.append(
            f"<tr><td>{escape(fault['title'])}</td>"
            f"<td>{accuracy['clean']:.0%} → {accuracy['struck']:.0%}</td>"
            f"<td>{_interval(fault['recall_at_5'])}</td><td>{_interval(control)}</td>"
            f"<td>{_against(fault['responses_to_detect'], target['responses'])}{_delay(fault)}</td>"
            f"<td>{_share(fault['missed'])}</td><td>{_number(fault['responses_to_reset'], '{:.0f}')}</td>"
            f"<td>{_against(fault['canary_responses_to_detect'], target['canaries'])}</td>"
            f"<td>{_share(fault['canary']['fpr'])}</td><td>{_named(fault['attributed'])}</td></tr>"
        )
    return _table(head, lines)


def _delay(fault: Mapping[str, Any]) -> str:
    """Tokens and seconds until the page, on a line of their own."""
    if fault["responses_to_detect"] is None:
        return ""
    seconds = _number(fault["seconds_to_detect"], "{:.1f}")
    return f"<br><small>{_number(fault['tokens_to_detect'], '{:.0f}')} tokens, {seconds} s</small>"


def _peers(card: Mapping[str, Any]) -> str:
    peers, library = card["peers"], card["made"]["lm_polygraph"]
    head = ("AUROC", "raw rule<br>fires on", "Quaver,<br>passive", *(_peer(name) for name in peers))
    lines = [
        f"<tr><td>{escape(fault['title'])}</td><td>{_share(card['raw_rule'][name])}</td>"
        f"<td><b>{_number(fault['passive']['auroc'], '{:.2f}')}</b></td>"
        + "".join(f"<td>{_number(found[name], '{:.2f}')}</td>" for found in peers.values())
        + "</tr>"
        for name, fault in card["faults"].items()
    ]
    rest = "<td></td>" * (1 + len(peers))
    lines.append(f"<tr><td>healthy</td><td>{_share(card['raw_rule']['clean'])}</td>{rest}</tr>")
    note = (
        f"Of the same answers. * by lm-polygraph {escape(library)} itself, at its default settings; below ½ "
        "struck answers look surer than healthy ones."
        if library
        else "lm-polygraph is not installed: its estimators are missing (docs/detection.md says how)."
    )
    return f"<p>{note}</p>{_table(head, lines)}"


def _peer(name: str) -> str:
    """A name as a column's head: broken where its words begin, * for those of the library."""
    library, _, estimator = name.rpartition(": ")
    words = re.sub(r"(?<=[a-z])(?=[A-Z])| (?=[a-z])", "<br>", escape(estimator))
    return f"{words}&nbsp;*" if library else words


def _table(head: Iterable[str], lines: Iterable[str]) -> str:
    cells = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="wide"><table><tr>{cells}</tr>{"".join(lines)}</table></div>'


def _against(value: float | None, least: float | None) -> str:
    """A count beside what it has to be at most."""
    if least is None:
        return _number(value, "{:.0f}")
    short = value is None or value > least
    return (
        f"<span{' class=bad' if short else ''}>{_number(value, '{:.0f}')}</span> <small>≤ {least:g}</small>"
    )


def _interval(estimate: Mapping[str, Any]) -> str:
    if estimate["value"] is None:
        return "–"
    low, high = estimate["ci"]
    return f"{estimate['value']:.0%} <small>{low:.0%}–{high:.0%}</small>"


def _named(attributed: Mapping[str, Any] | None) -> str:
    return "–" if attributed is None else f"{attributed['right']:.0%}, {attributed['wrong']:.0%}"


def _share(value: float | None) -> str:
    return _number(value, "{:.0%}")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
