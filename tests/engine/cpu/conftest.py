"""The native kernels, once for each instruction set that this machine runs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from engine.kernels.cpu import build
from engine.kernels.cpu.library import open_library

#: A library is named by its source and compiler, so a stale one is never opened.
CACHE = Path("~/.cache/quaver/kernels")


@pytest.fixture(scope="session", params=build.instruction_sets())
def native(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The library of one instruction set, compiled if its source is new."""
    return open_library(request.param, CACHE)
