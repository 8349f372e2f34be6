"""Runs the kernels' tests in a process where Triton interprets: the switch is read at its import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'quaver[gpu]'")

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[3]


def version(package: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in package.__version__.split(".")[:2])


@pytest.mark.skipif(
    version(triton) < (3, 7) and version(np) >= (2, 4),
    reason="the interpreter of Triton before 3.7 does not run on NumPy 2.4",
)
def test_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--confcutdir", str(FOLDER)]
    run = subprocess.run(
        [*command, str(FOLDER)],
        cwd=ROOT,
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
