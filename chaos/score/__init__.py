"""The scorecard: what each fault hurts, what sees it, how fast, and how often falsely."""
