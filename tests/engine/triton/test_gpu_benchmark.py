"""The GPU benchmark as far as it goes without one: its options, and that it says so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], cwd="/", env=dict(os.environ), capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    found = run("--output", str(output))
    assert found.returncode == 3
    assert "needs an NVIDIA GPU" in found.stderr
    assert "--compile" in found.stderr
    assert not output.exists()


def test_options() -> None:
    assert "--compile" in run("--help").stdout
    unknown = run("--fast")
    assert unknown.returncode == 2
    assert "unrecognized arguments: --fast" in unknown.stderr
