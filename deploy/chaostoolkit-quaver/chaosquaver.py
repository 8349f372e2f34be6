"""Quaver's extension for Chaos Toolkit; it lives in `chaos.toolkit`."""

from chaos.toolkit import discover

__all__ = ["discover"]
