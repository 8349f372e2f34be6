"""The engines that are measured side by side, each in a process of its own."""
