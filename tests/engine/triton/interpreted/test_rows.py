"""Norms, rotary positions with the page write, and packed pages against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import fused, reference, triton

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
dtypes = st.sampled_from(list(ROUNDING))


@given(st.integers(0, 6), st.integers(1, 70), dtypes, dtypes)
@settings(deadline=None, max_examples=20)
def test_add_rms_norm(rows: int, width: int, added: torch.dtype, dtype: torch.dtype) -> None:
    x, delta, weight = torch.randn(rows, width), torch.randn(rows, width).to(added), torch.randn(width)
    residual, expected_residual = x.clone(), x.clone()
    found = triton.add_rms_norm(residual, delta, weight, 1e-5, dtype)
    expected = fused.add_rms_norm(expected_residual, delta, weight, 1e-5, dtype)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(found, expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(
        triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=2e-6, rtol=2e-6
    )


@given(
    count=st.integers(0, 6),
    groups=st.integers(1, 3),
    share=st.integers(1, 4),
    width=st.sampled_from([2, 8, 24]),
    dtype=dtypes,
    normed=st.booleans(),
)
@settings(deadline=None, max_examples=20)
def test_rope_write(
    *, count: int, groups: int, share: int, width: int, dtype: torch.dtype, normed: bool
) -> None:
    qkv = torch.randn(count, groups * (share + 2), width).to(dtype)
    angles = 6 * torch.rand(50, 1, width // 2)
    positions = torch.randint(50, (count,))
    slots = torch.randperm(20)[:count]
    norms = (torch.randn(width), torch.randn(width)) if normed else None
    pages = [torch.randn(5, 4, groups, width).to(dtype) for _ in range(2)]
    expected_pages = [page.clone() for page in pages]
    tables = (angles.cos(), angles.sin())
    found = triton.rope_write(qkv, *tables, positions, slots, *pages, norms, 1e-6)
    expected = fused.rope_write(qkv, *tables, positions, slots, *expected_pages, norms, 1e-6)
    tolerance = 4 * ROUNDING[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(pages, expected_pages, atol=tolerance, rtol=tolerance)
    assert torch.equal(pages[1], expected_pages[1]), "values pass through untouched"


@given(st.integers(0, 4), st.sampled_from([1, 3, 16]), st.integers(1, 3), st.sampled_from([1, 8, 24]), dtypes)
@settings(deadline=None, max_examples=20)
def test_packed_pages(count: int, size: int, groups: int, width: int, dtype: torch.dtype) -> None:
    pages = torch.randn(6, size, groups, width).to(dtype)
    pages[2] = 0
    ids, used = torch.randperm(6)[:count], torch.randint(size + 1, (count,))
    for name in ("keys", "values"):
        found = getattr(triton, f"pack_{name}")(pages, ids, used)
        expected = getattr(fused, f"pack_{name}")(pages, ids, used)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.codes, expected.codes)
        restored, expected_pages = pages.clone(), pages.clone()
        getattr(triton, f"unpack_{name}")(restored, ids, found)
        getattr(fused, f"unpack_{name}")(expected_pages, ids, expected)
        # The interpreter cuts bf16 off where a GPU rounds it.
        cut = ROUNDING[dtype] if dtype == torch.bfloat16 else 0
        torch.testing.assert_close(restored, expected_pages, rtol=cut, atol=0)
        for entry, page in enumerate(ids.tolist()):
            held = slice(0, int(used[entry]))
            spread = found.scales[entry][None] if name == "keys" else found.scales[entry, held, :, None]
            error = (restored[page, held].float() - pages[page, held].float()).abs()
            assert (error <= (0.5 + 127 * 2 * ROUNDING[dtype]) * spread + 1e-6).all()
            assert (restored[page, held.stop :] == 0).all()


def test_slices_are_read_as_they_are() -> None:
    """Strided indices are copied, strided values refused: never misread."""
    pages = torch.randn(6, 4, 2, 8)
    ids, used = torch.randperm(6).view(3, 2)[:, 1], torch.tensor([[4, 9], [3, 9], [1, 9]])[:, 0]
    found, expected = triton.pack_keys(pages, ids, used), fused.pack_keys(pages, ids, used)
    assert torch.equal(found.codes, expected.codes)
    with pytest.raises(ValueError, match=r"contiguous tensors; this \(6, 4, 1, 8\)"):
        triton.pack_keys(pages[:, :, :1], ids, used)


def test_interpreted_kernels_have_no_machine_code() -> None:
    from engine.kernels.triton import ahead

    use, launch = next(ahead.launches(ahead.MODELS[0]))
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"):
        ahead.cost("model", use, launch, 80)
