"""Opens the native kernels and tells ctypes about them."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from engine.kernels.cpu import build


@cache
def open_library(isa: str, cache_folder: Path) -> ctypes.CDLL:
    """Open the kernels of an instruction set. Raises `build.BuildError`."""
    path = build.library(isa, cache_folder)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise build.BuildError(f"{path} cannot be loaded: {error}; remove it and start again") from error
