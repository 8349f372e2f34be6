"""Runs the kernels' tests in a process where Triton interprets: the switch is read at its import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the triton package is not installed: pip install 'quaver[gpu]'")

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("module", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_kernels_under_the_interpreter(module: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--confcutdir", str(FOLDER)]
    run = subprocess.run(
        [*command, str(FOLDER / module)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_backend_is_refused() -> None:
    """The message says what is missing and what to do."""
    code = "from engine.kernels import triton; triton.check()"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "RuntimeError: the triton backend needs an NVIDIA GPU" in run.stderr
    assert "QUAVER_BACKEND=auto" in run.stderr
