"""HTML fragments. Every piece of content that reaches them is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import exp, isfinite
from statistics import fmean
from typing import Any

from dashboards.judge import Tile
from dashboards.palette import LOG_P_DOMAIN, STATES, Mode, ink_on, log_p_colour

LOW_CONFIDENCE = 0.3
MARKDOWN = frozenset("\\`*_{}[]()#+!|<>$~:")


def tile_row(title: str, tiles: Sequence[Tile]) -> str:
    """Return a titled group of judged tiles."""
    cells = "".join(_tile(tile) for tile in tiles)
    return f'<section class="q-group"><h4>{escape(title)}</h4><div class="q-tiles">{cells}</div></section>'


def _tile(tile: Tile) -> str:
    spoken = f"{tile.label}: {tile.value} {tile.unit}, {tile.word}"
    word = (
        f'<span class="q-dot" style="background:{STATES[tile.state]}"></span>{escape(tile.word)}'
        if tile.word
        else ""
    )
    return (
        f'<div class="q-tile" role="img" aria-label="{escape(spoken)}" title="{escape(tile.help)}"'
        f' style="border-left-color:{STATES[tile.state]}">'
        f'<div class="q-label">{escape(tile.label)}</div>'
        f'<div class="q-value">{escape(tile.value)}<span class="q-unit">{escape(tile.unit)}</span></div>'
        f'<div class="q-foot"><span class="q-word">{word}</span>{_sparkline(tile.trend)}</div></div>'
    )


def _sparkline(values: Sequence[float | None], bars: int = 30) -> str:
    """Return the trend as bars from zero to its largest value; a gap is no traffic."""
    size = max(1, -(-len(values) // bars))
    means: list[float | None] = []
    for at in range(0, len(values), size):
        known = [value for value in values[at : at + size] if value is not None]
        means.append(fmean(known) if known else None)
    top = max((abs(mean) for mean in means if mean is not None), default=0.0)
    if top == 0.0:
        return ""
    heights = (0.0 if mean is None else max(6.0, 100 * abs(mean) / top) for mean in means)
    cells = "".join(f'<i style="height:{height:.0f}%"></i>' for height in heights)
    return f'<span class="q-spark" aria-hidden="true">{cells}</span>'


def facts(pairs: Sequence[tuple[str, Any]]) -> str:
    """Return a compact list of names and values; None is shown as a dash."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{'–' if value is None else escape(str(value))}</dd></div>"
        for name, value in pairs
    )
    return f'<dl class="q-facts">{cells}</dl>'


def banner(state: str, title: str, text: str) -> str:
    """Return a banner whose edge shows `state`, a key of `palette.STATES`."""
    return (
        f'<div class="q-banner" role="status" style="border-left-color:{STATES[state]}">'
        f'<strong class="q-count">{escape(title)}</strong><p class="q-count">{escape(text)}</p></div>'
    )


def note(text: str) -> str:
    """Return a line of small text in which `code` between backticks is set as code."""
    parts = [escape(part) for part in text.split("`")]
    cells = "".join(f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts))
    return f'<div class="q-note">{cells}</div>'


def plain(text: str) -> str:
    """Return text that Streamlit's Markdown shows as it is."""
    return "".join("\\" + c if c in MARKDOWN else c for c in text)


def visible(text: str) -> str:
    """Return text with spaces, tabs and line ends made visible, and ∅ for none (not yet escaped)."""
    return text.replace(" ", "·").replace("\t", "⇥").replace("\r", "␍").replace("\n", "⏎") or "∅"


def ribbon(tokens: dict[str, list[Any]], mode: Mode, chosen: int | None = None) -> str:
    """Return the answer as coloured tokens: fill is log p on −5…0, underline is rank > 1 or p < 0.3.

    Without captured text a token is its index. `chosen` is the position of the token to frame.
    """
    texts = tokens.get("text") or []
    cells = []
    for index in range(len(tokens.get("step", []))):
        text = texts[index] if index < len(texts) else None
        cells.append(_token(tokens, index, text, mode, framed=index == chosen))
    kind = "q-ribbon" if any(text is not None for text in texts) else "q-ribbon q-chips"
    label = "Tokens coloured by log probability"
    return f'<div class="{kind}" role="figure" aria-label="{label}">{"".join(cells)}</div>'


def _token(tokens: dict[str, list[Any]], index: int, text: str | None, mode: Mode, framed: bool) -> str:
    surprisal, rank = _at(tokens, "surprisal", index), _at(tokens, "rank", index)
    confidence, entropy = _at(tokens, "confidence", index), _at(tokens, "entropy", index)
    if confidence is None and surprisal is not None:
        confidence = exp(-surprisal)
    told = [f"token {index}"]
    told += [f"p {confidence:.3f}"] if confidence is not None else []
    told += [f"log p {-surprisal:.2f}"] if surprisal is not None else []
    told += [f"rank {int(rank)}"] if rank is not None else []
    told += [f"entropy {entropy:.2f} nats"] if entropy is not None else []
    classes = ["q-tok"]
    if (rank is not None and rank > 1) or (confidence is not None and confidence < LOW_CONFIDENCE):
        classes.append("q-doubt")
    if framed:
        classes.append("q-chosen")
    style = ""
    if surprisal is not None:
        fill = log_p_colour(-surprisal, mode)
        style = f' style="background:{fill};color:{ink_on(fill)}"'
    shown = str(index) if text is None else visible(text)
    after = "<br>" * text.count("\n") if text else ""
    hint = escape(" · ".join(told))
    return f'<span class="{" ".join(classes)}" title="{hint}"{style}>{escape(shown)}</span>{after}<wbr>'


def ribbon_legend(mode: Mode) -> str:
    """Return the colour key of the ribbon, with its domain in numbers."""
    low, high = LOG_P_DOMAIN
    stops = ",".join(log_p_colour(low + (high - low) * k / 8, mode) for k in range(9))
    return (
        f'<div class="q-key"><span>log p ≤ {low:.0f}</span>'
        f'<i style="background:linear-gradient(90deg,{stops})"></i><span>{high:.0f}</span>'
        f'<span class="q-gap"><span class="q-doubt">underlined</span>: not the likeliest token,'
        f" or p &lt; {LOW_CONFIDENCE}</span></div>"
    )


def _at(tokens: dict[str, list[Any]], column: str, index: int) -> float | None:
    values = tokens.get(column) or []
    value = values[index] if index < len(values) else None
    return value if isinstance(value, (int, float)) and isfinite(value) else None
