"""The dashboard's entry: `streamlit run` starts here, `python -m dashboards` with its flags and theme."""

from __future__ import annotations

import streamlit as st

from dashboards.session import style
from dashboards.views import pages

MARK = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7"'
    ' fill="#2f5d9b"/><path d="M4 17h5l3-9 5 17 4-12 2 4h5" fill="none" stroke="#fff" stroke-width="2.6"'
    ' stroke-linecap="round" stroke-linejoin="round"/></svg>'
)

st.set_page_config(page_title="Quaver", page_icon=MARK, layout="wide")
style()
st.navigation(pages(), position="top").run()
