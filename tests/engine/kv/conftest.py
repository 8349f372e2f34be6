"""The native kernels, as their own tests have them."""

from __future__ import annotations

from tests.engine.cpu.conftest import native

__all__ = ["native"]
