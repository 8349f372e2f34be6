"""Colours. Mid-tones that hold on light and dark pages, and cividis for everything measured."""

from __future__ import annotations

from typing import Literal

Mode = Literal["light", "dark"]

BLUE, VIOLET, ORANGE, TEAL, ROSE, GREY = "#4C86C6", "#8F6BC2", "#D9822B", "#2A9D8F", "#C4587A", "#7C8896"
STATES = {"steady": "#2E9E6B", "watch": "#D9902F", "alarm": "#D64545", "none": "#98A2AE"}
BANDS = {"fault": "#8F6BC2", "L1": "#D9902F", "L2": "#D64545"}

LOG_P_DOMAIN = (-5.0, 0.0)
_CIVIDIS = (
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8779",
    "#a69d75",
    "#c4b56c",
    "#e4cf5b",
    "#fee838",
)


def cividis(at: float) -> str:
    """Return the colour at a position from 0 (dark blue) to 1 (yellow), clipped, as `#rrggbb`."""
    place = min(max(at, 0.0), 1.0) * (len(_CIVIDIS) - 1)
    low = min(int(place), len(_CIVIDIS) - 2)
    pairs = zip(_channels(_CIVIDIS[low]), _channels(_CIVIDIS[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in pairs)


def log_p_colour(log_p: float, mode: Mode) -> str:
    """Return the fill of a token by log p on the fixed domain −5…0.

    Sure tokens recede into the page, surprising ones stand out: the scale is turned on dark pages.
    """
    low, high = LOG_P_DOMAIN
    at = (min(max(log_p, low), high) - low) / (high - low)
    return cividis(at if mode == "light" else 1.0 - at)


def ink_on(fill: str) -> str:
    """Return black or white, whichever contrasts more with `fill` (WCAG; at least 4.5 on any fill)."""
    return max(("#000000", "#ffffff"), key=lambda ink: contrast(ink, fill))


def contrast(first: str, second: str) -> float:
    """Return the WCAG contrast ratio of two colours, 1 to 21."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(c / 255) for c in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
