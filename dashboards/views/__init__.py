"""The pages. A new page is one module here and one line in `pages`."""

from __future__ import annotations

import streamlit as st

from dashboards.views import chaos, live, request, tiers


def pages() -> list[st.Page]:
    """Return the pages in the order of the menu."""
    return [
        st.Page(live.page, title="Live", icon=":material/monitor_heart:", default=True),
        st.Page(request.page, title="Request", icon=":material/troubleshoot:", url_path="request"),
        st.Page(tiers.page, title="KV tiers", icon=":material/layers:", url_path="tiers"),
        st.Page(chaos.page, title="Chaos", icon=":material/bolt:", url_path="chaos"),
    ]
