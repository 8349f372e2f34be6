"""These tests run kernels in Triton's interpreter, which must be on before Triton is imported.

`tests/engine/triton/test_interpreter.py` runs this folder in a process of its own.
"""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """NumPy stands in for the GPU; it warns of infinities in lanes that a kernel then masks."""
    for kind in ("RuntimeWarning", "DeprecationWarning"):  # older Triton with newer NumPy
        config.addinivalue_line("filterwarnings", f"ignore::{kind}:triton.runtime.interpreter")
