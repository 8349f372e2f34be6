"""Head statistics of the native kernels against the reference."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import reference
from tests.engine.cpu.paged import Case, cases, decode, p, relaxed


def statistics(native: ctypes.CDLL, weights: Tensor, length: int, prompt_length: int) -> Tensor:
    """[5, H] of weights [H, stride]."""
    out = torch.full((5, weights.shape[0]), -7.0)
    native.quaver_head_statistics(
        p(weights), ctypes.c_int64(weights.shape[1]), weights.shape[0], length, prompt_length, p(out)
    )
    return out


@relaxed
@given(case=cases(700), prompt=st.floats(0, 1), loud=st.sampled_from([1, 20]))
def test_head_statistics_of_decodes_weights(
    native: ctypes.CDLL, case: Case, prompt: float, loud: int
) -> None:
    case = replace(
        case, window=0, holed=0.0, loudness=case.loudness * loud
    )  # most weights underflow when loud
    _, weights = decode(native, case, True)
    assert weights is not None
    prompt_length = max(1, round(prompt * case.context))
    out = statistics(native, weights, case.context, prompt_length)
    expected = reference.head_statistics(
        case.queries()[-1:].float(),
        case.keys.nan_to_num(),
        case.table[None].long(),
        torch.tensor([case.context]),
        torch.tensor([prompt_length]),
    )[0]
    torch.testing.assert_close(out, expected, rtol=2e-4, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("heads", [1, 2, 9])
def test_head_statistics_of_heads_that_agree_are_zero(native: ctypes.CDLL, heads: int) -> None:
    weights = torch.rand(300).softmax(0).expand(heads, 300).contiguous()
    out = statistics(native, weights, 300, 300)
    assert out[:2].abs().max() < 1e-6
    assert torch.equal(out[2], weights[:, 0])
    assert torch.equal(out[3], weights[:, 298])
    assert out[4].isnan().all()  # nothing is generated yet


def test_head_statistics_of_certain_heads(native: ctypes.CDLL) -> None:
    weights = torch.zeros(2, 40)
    weights[0, 0] = weights[1, 39] = 1  # each is certain of another position: both are ln 2 from their mean
    out = statistics(native, weights, 40, 20)
    torch.testing.assert_close(out[0], torch.full((2,), 2.0).log())
    torch.testing.assert_close(out[1], torch.zeros(2))
    torch.testing.assert_close(out[4], torch.tensor([1.0, 0.0]))


def test_head_statistics_of_one_token(native: ctypes.CDLL) -> None:
    out = statistics(native, torch.ones(3, 1), 1, 1)
    assert torch.equal(out[:3], torch.tensor([[0.0], [0.0], [1.0]]).expand(3, 3))
    assert out[3:].isnan().all()
