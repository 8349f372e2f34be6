"""KV tiers: where prompts come from, what moves between pool, memory and disk, and what that is worth."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from dashboards import flow, markup, tier_charts
from dashboards.api import ApiError
from dashboards.intervals import clock
from dashboards.judge import State, Tile
from dashboards.session import api, heading, mode, tell
from dashboards.settings import DashboardSettings
from dashboards.shapes import Live, Tiers

SHOWN_S = 600
REFRESH_S = DashboardSettings().refresh_s
HOW = (
    "Nothing lies below the KV pool. Start the engine with `QUAVER_KV_HOST_MB=512` to keep in memory "
    "what the pool gives up, and with `QUAVER_KV_DISK_DIR=/some/folder` to keep it on disk, across restarts "
    "too. Both need `QUAVER_PREFIX_CACHE` and are off with `QUAVER_DETERMINISTIC`."
)
POLICY = {
    "preset": ("Preset (QUAVER_KV_POLICY)", "{}"),
    "disk_age_s": ("To disk if unwanted for", "{:g} s"),
    "disk_entropy": ("and attention entropy below", "{:g}"),
    "full": ("Pages copied ahead above", "{:.0%} of the pool"),
    "relaxed": ("until below", "{:.0%}"),
    "drop": ("Tokens left out at most", "{:.0%}"),
    "deadline_s": ("A prompt waits at most", "{:g} s"),
    "step_beside_decodes_s": ("Packing beside decodes", "{:g} s a step"),
    "step_alone_s": ("Packing without", "{:g} s a step"),
}
COLUMNS = {
    "tokens read": st.column_config.NumberColumn(format="localized"),
    "tokens kept": st.column_config.NumberColumn(format="localized"),
    "saved, s": st.column_config.NumberColumn(format="%.1f"),
    "lost, s": st.column_config.NumberColumn(format="%.2f"),
    "saved in the last minute, s": st.column_config.NumberColumn(format="%.1f"),
    "load of a block, ms": st.column_config.NumberColumn(format="%.1f"),
    "store of a block, ms": st.column_config.NumberColumn(format="%.1f"),
    "bytes, × the pool's": st.column_config.NumberColumn(format="%.3f"),
}
LOSSES = ("corrupt", "late", "errors", "refused", "foreign", "collisions")
MOVES = ("hits", "misses", "stores", "promotions", "evictions")
QUIET = (
    "No prompt has been served in this time. Send traffic with `quaver load`, or see the whole path once "
    "with `quaver demo`."
)


def page() -> None:
    """Draw the page."""
    st.title("KV tiers")
    _figures()


@st.fragment(run_every=REFRESH_S)
def _figures() -> None:
    try:
        tiers, live = api().tiers(), api().live(SHOWN_S)
    except ApiError as error:
        tell(error)
        return
    if not tiers.tiers:
        st.info(
            "No model process has told of its KV cache yet: it is loading, or restarts.",
            icon=":material/hourglass_top:",
        )
    elif len(tiers.tiers) == 1:
        st.info(HOW, icon=":material/layers:")
    st.html(markup.tile_row("Last minute", tiles(tiers, live)))
    heading("What moves")
    st.html(flow.picture(tiers))
    if len(tiers.tiers) > 1:
        st.caption(
            f"Means of the last minute, as of {clock(tiers.time)}. A block has {tiers.block_tokens} tokens. "
            "What comes from disk goes to its pages at once, and the host keeps a copy."
        )
    _charts(tiers, live)
    _tables(tiers)


def _charts(tiers: Tiers, live: Live) -> None:
    left, right = st.columns(2, gap="large")
    with left:
        heading("Where prompts came from")
        data = tier_charts.sources(live)
        if data.empty:
            st.info(QUIET, icon=":material/play_circle:")
        else:
            st.altair_chart(
                tier_charts.source_chart(data),
                key="sources",
                alt="Tokens of prompts a second by where they came from: " + _sums(data, "source"),
            )
    with right:
        heading("Time since it was last wanted")
        data = tier_charts.ages(tiers)
        if data.empty:
            st.caption("Nothing is kept yet.")
        else:
            st.altair_chart(
                tier_charts.age_chart(data, tiers, mode()),
                key="ages",
                alt="Tokens kept by the time since they were last wanted: " + _sums(data, "age"),
            )


def _tables(tiers: Tiers) -> None:
    if not tiers.tiers:
        return
    heading("Since the server began")
    st.dataframe(
        gains(tiers),
        hide_index=True,
        placeholder="–",
        column_config=COLUMNS,
        alt="Tokens and seconds by tier",
        key="gains",
    )
    if len(tiers.tiers) > 1:
        told = blocks(tiers)
        st.dataframe(told, hide_index=True, placeholder="–", alt="Blocks by tier, and losses", key="blocks")
    if tiers.policy:
        heading("Policy in force")
        st.html(markup.facts([policy_fact(name, value) for name, value in tiers.policy.items()]))


def tiles(tiers: Tiers, live: Live) -> list[Tile]:
    """Return what the last minute was like; lost blocks count since the server began."""
    window = {source: (live.series.get(f"prompt_{source}") or [])[-60:] for source in tier_charts.SOURCES}
    sums = {source: sum(value or 0.0 for value in series) for source, series in window.items()}
    every = sum(sums.values())
    read = every - sums["computed"]
    trend = [
        sum(values) if any(values) else None
        for values in zip(*([v or 0.0 for v in window[s]] for s in window if s != "computed"), strict=True)
    ]
    saved = sum(tier.rates.get("saved_s", 0.0) for tier in tiers.tiers) * tiers.window_s
    lost = sum(tier.rates.get("lost_s", 0.0) for tier in tiers.tiers) * tiers.window_s
    wait = ("–", "") if tiers.wait_s is None else _seconds(tiers.wait_s)
    return [
        Tile(
            "Prompt tokens read",
            f"{100 * read / every:.1f}" if every else "–",
            "%" if every else "",
            "none",
            f"of {every / 1000:,.0f}k tokens" if every else "no traffic",
            trend,
            "Of the prompts answered in the last minute, the tokens that were not computed",
        ),
        Tile(
            "Computing saved",
            *_seconds(saved),
            "watch" if lost > saved else "none",
            f"{_seconds(lost)[0]} {_seconds(lost)[1]} lost",
            [],
            "Estimated computing that reading made unnecessary, less the wait for it; lost: the wait beyond",
        ),
        Tile(
            "Wait for a tier",
            *wait,
            "none",
            f"{tiers.waited:.2g} prompts/s" if tiers.waited else "nobody waited",
            [],
            "Mean of the prompts that waited for host or disk",
        ),
        _lost(
            tiers, "corrupt", "Corrupt blocks", "Bytes that were not what was stored; they are computed again"
        ),
        _lost(tiers, "late", "Late loads", "Not there at the deadline; they are computed again"),
        _lost(tiers, "errors", "I/O errors", "Reads, writes and hand-overs that failed"),
    ]


def _lost(tiers: Tiers, key: str, label: str, about: str) -> Tile:
    """A tile that counts since the server began and is judged by the last minute."""
    count = sum(tier.counts.get(key, 0.0) for tier in tiers.tiers)
    recent = sum(tier.rates.get(key, 0.0) for tier in tiers.tiers) * tiers.window_s
    state: State = "alarm" if recent else "watch" if count else "steady"
    word = f"{recent:.0f} in the last minute" if count else "none since the start"
    return Tile(label, f"{count:.0f}", "", state, word, [], about)


def gains(tiers: Tiers) -> pd.DataFrame:
    """Return what each tier was worth: tokens read, seconds saved and lost; what loads and stores take."""
    rows = [
        {
            "tier": tier.tier,
            "tokens read": tier.counts.get("served_tokens", 0.0),
            "saved, s": tier.counts.get("saved_s"),
            "lost, s": tier.counts.get("lost_s"),
            "saved in the last minute, s": tier.rates.get("saved_s", 0.0) * tiers.window_s,
            "load of a block, ms": _ms(tier.load_s),
            "store of a block, ms": _ms(tier.store_s),
            "tokens kept": tier.tokens,
            "bytes, × the pool's": tier.compression_ratio,
        }
        for tier in tiers.tiers
    ]
    return pd.DataFrame(rows)


def blocks(tiers: Tiers) -> pd.DataFrame:
    """Return what became of the blocks of the tiers below the pool."""
    rows = []
    for tier in tiers.tiers:
        if tier.tier != "device":
            packed = tier.counts.get("dropped_tokens", 0.0) + tier.counts.get("kept_tokens", 0.0)
            dropped = tier.counts.get("dropped_tokens", 0.0) / packed if packed else None
            counts = {key: int(tier.counts.get(key, 0.0)) for key in (*MOVES, *LOSSES)}
            rows.append({"tier": tier.tier, **counts, "dropped, share": dropped})
    return pd.DataFrame(rows)


def policy_fact(name: str, value: Any) -> tuple[str, str]:
    """Return a figure of the policy in words; one that has none yet keeps its name."""
    words, form = POLICY.get(name, (name.replace("_", " "), "{}"))
    return words, form.format(value)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _seconds(value: float) -> tuple[str, str]:
    return (f"{1000 * value:.0f}", "ms") if 0 < value < 1 else (f"{value:,.0f}", "s")


def _sums(data: pd.DataFrame, column: str) -> str:
    return ", ".join(
        f"{name} {group['tokens'].sum():,.0f}" for name, group in data.groupby(column, sort=False)
    )
