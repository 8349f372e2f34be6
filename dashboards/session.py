"""What every page needs of Streamlit: the client, the theme's mode, and how to say that something failed."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards.api import Api, ApiError
from dashboards.markup import plain
from dashboards.palette import Mode
from dashboards.settings import DashboardSettings

STYLE = Path(__file__).with_name("style.css")


@st.cache_resource(max_entries=4, show_spinner=False, on_release=Api.close)
def _client(url: str, key: str | None) -> Api:
    return Api(url, key)


def api() -> Api:
    """Return the client of the engine named by the environment; the key file is read anew each time."""
    settings = DashboardSettings()
    return _client(settings.url, settings.read_key())


def mode() -> Mode:
    """Return which theme the browser shows; light while it has not said."""
    return "dark" if st.context.theme.type == "dark" else "light"


def style() -> None:
    """Add the style sheet to the page."""
    st.html(STYLE)


def heading(text: str) -> None:
    """Write a small section heading."""
    st.html(f'<div class="q-h">{text}</div>')


def tell(error: ApiError) -> None:
    """Say what failed and what mends it."""
    st.error(f"{plain(error.message)}\n\n{error.mend}", icon=":material/cloud_off:")
