"""Known prompts, replayed on the live engine and compared with their own answers in health."""
