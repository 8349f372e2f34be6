"""The demo: a real model observed, broken on purpose and caught, with a scorecard at the end."""
