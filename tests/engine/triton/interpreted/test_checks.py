"""The GPU benchmark's own checks, on kernels that are interpreted."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.gpu_check import Check, Sizes, checks, error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_checks_pass(dtype: torch.dtype) -> None:
    sizes = Sizes(heads=4, groups=2, width=16, hidden=32, inner=24, vocab=200)
    found = list(checks(torch.device("cpu"), sizes, dtype, [1, 2, 9, 20]))
    assert [check for check in found if not check.passed] == []
    assert len({check.name for check in found}) == len(found) > 40


def test_errors_count() -> None:
    one, nan = torch.tensor([1.0, 200.0]), torch.tensor([1.0, math.nan])
    assert error(one, torch.tensor([1.0, 202.0])) == pytest.approx(0.01, abs=1e-3)
    assert error(nan, nan) == 0
    assert not Check("", error(one, nan), 1.0).passed
