"""The KV tiers as a picture: what each holds, and what moves between them. HTML that follows the theme."""

from __future__ import annotations

from html import escape
from math import sqrt

from dashboards.palette import BLUE, GREY, TEAL, VIOLET
from dashboards.shapes import Tier, Tiers

COLOURS = {"device": BLUE, "host": TEAL, "disk": VIOLET}
ABOUT = {
    "device": ("Device", "pages of the KV pool, as the model computes them"),
    "host": ("Host", "blocks in memory, 8 bits"),
    "disk": ("Disk", "blocks in files, compressed"),
}
OFF = {"host": "QUAVER_KV_HOST_MB", "disk": "QUAVER_KV_DISK_DIR"}
_THIN_PX, _THICK_PX = 2.0, 12.0


def picture(tiers: Tiers) -> str:
    """Return the tiers side by side with arrows as thick as the bytes a second that move."""
    flows = between(tiers)
    most = max((rate for pair in flows.values() for rate, _ in pair), default=0.0)
    host, disk = (
        f'<div class="q-flows">{_arrow(flows[name][0], most, name, down=True)}'
        f"{_arrow(flows[name][1], most, name, down=False)}</div>"
        for name in ("host", "disk")
    )
    boxes = {name: _box(name, tiers.find(name)) for name in ABOUT}
    return (
        f'<div class="q-tiers" role="img" aria-label="{escape(told(tiers))}">'
        f"{boxes['device']}{host}{boxes['host']}{disk}{boxes['disk']}</div>"
    )


def between(tiers: Tiers) -> dict[str, tuple[tuple[float, float], tuple[float, float]]]:
    """Return, for each tier below the pool, (bytes, blocks) a second that go down to it and come up from it.

    What a tier stores and was not promoted came from above. What is loaded from disk goes to its pages, and
    to the host as a copy.
    """
    found = {}
    for name in OFF:
        tier = tiers.find(name)
        rates = tier.rates if tier else {}
        down = rates.get("stored_bytes", 0.0), rates.get("stores", 0.0) - rates.get("promotions", 0.0)
        found[name] = down, (rates.get("loaded_bytes", 0.0), rates.get("hits", 0.0))
    return found


def told(tiers: Tiers) -> str:
    """Return the picture in words."""
    parts = []
    for name, (down, up) in between(tiers).items():
        if tiers.find(name) is None:
            parts.append(f"{name}: off")
        else:
            parts.append(f"{name}: {size(down[0])} a second go down to it, {size(up[0])} come back")
    return "; ".join(parts)


def size(count: float) -> str:
    """Return bytes with three digits at most and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def _box(name: str, tier: Tier | None) -> str:
    title, about = ABOUT[name]
    colour = COLOURS[name]
    if tier is None:
        return (
            f'<section class="q-tier q-off"><h4>{title}</h4><p>off</p>'
            f'<p class="q-note">Start the engine with <code>{OFF.get(name, "")}</code>.</p></section>'
        )
    share = tier.bytes_used / tier.bytes_total if tier.bytes_total else 0.0
    ratio = "" if tier.compression_ratio is None else f" · {tier.compression_ratio:.2f} × the pool's bytes"
    return (
        f'<section class="q-tier" style="border-top-color:{colour}"><h4>{title}</h4><p>{about}</p>'
        f'<div class="q-bar"><i style="width:{100 * share:.1f}%;background:{colour}"></i></div>'
        f'<div class="q-of"><b>{size(tier.bytes_used)}</b> of {size(tier.bytes_total)}'
        f"<span>{share:.0%}</span></div>"
        f'<div class="q-of">{tier.tokens:,} tokens{ratio}</div></section>'
    )


def _arrow(flow: tuple[float, float], most: float, name: str, *, down: bool) -> str:
    """An arrow to the right (`down`) or left; its thickness goes with the root of the rate."""
    rate, blocks = flow
    colour = COLOURS[name] if rate else GREY
    thick = _THIN_PX + (_THICK_PX - _THIN_PX) * sqrt(rate / most) if rate else _THIN_PX
    head = 5 + thick / 2
    side = "left" if down else "right"
    point = (
        f'<b style="border-top:{head:.1f}px solid transparent;border-bottom:{head:.1f}px solid transparent;'
        f'border-{side}:{1.3 * head:.1f}px solid {colour}"></b>'
    )
    line = f'<i style="height:{thick:.1f}px;background:{colour}"></i>'
    words = f"{size(rate)}/s" if rate else "nothing"
    more = f" · {blocks:.3g} blocks/s" if rate else ""
    still = "" if rate else " q-still"
    return (
        f'<div class="q-flow{still}"><span>{words}{more}</span>'
        f'<div class="q-arrow">{line + point if down else point + line}</div></div>'
    )
