"""The Streamlit dashboard: live signals, one request in depth, and the chaos desk. Talks HTTP only."""
