"""Rotary positions and paged attention of the native kernels against the reference."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import reference
from tests.engine.cpu.paged import BF16, Case, Rotary, cases, decode, p, relaxed, scratch


def decode_in_parts(native: ctypes.CDLL, case: Case, with_weights: bool) -> tuple[Tensor, Tensor | None]:
    """The same by parts computed from the last to the first."""
    heads, pages = case.structures()
    out = torch.full((case.heads, case.width), float("nan"))
    weights = torch.full((case.heads, case.context + 3), float("nan")) if with_weights else None
    native.quaver_decode_part_floats.restype = ctypes.c_size_t
    native.quaver_decode_part_scratch_bytes.restype = ctypes.c_size_t
    count = native.quaver_decode_parts(case.context - 1)
    parts = scratch(4 * count * native.quaver_decode_part_floats(ctypes.byref(heads)))
    room = scratch(native.quaver_decode_part_scratch_bytes(ctypes.byref(heads)))
    stride = ctypes.c_int64(case.context + 3)
    for group in range(case.groups):
        for part in reversed(range(count)):
            native.quaver_decode_attention_part(
                p(case.qkv[-1]),
                ctypes.byref(heads),
                ctypes.byref(pages),
                p(case.table),
                case.context - 1,
                group,
                part,
                p(parts),
                p(weights),
                stride,
                p(room),
            )
        native.quaver_decode_attention_merge(
            ctypes.byref(heads), case.context - 1, group, p(parts), p(out), p(weights), stride
        )
    return out, weights


def prefill(
    native: ctypes.CDLL, case: Case, start: int, scored: int = 0, mass: Tensor | None = None
) -> Tensor:
    """Attention of positions `start` …: [rows, H, D]; adds that of positions `scored` … to `mass`."""
    heads, pages = case.structures()
    count = case.context - start
    out = torch.full((count, case.heads, case.width), float("nan"))
    native.quaver_prefill_layout_bytes.restype = ctypes.c_size_t
    native.quaver_prefill_scratch_bytes.restype = ctypes.c_size_t
    layout = scratch(native.quaver_prefill_layout_bytes(ctypes.byref(heads), case.context))
    room = scratch(native.quaver_prefill_scratch_bytes(ctypes.byref(heads), case.context))
    native.quaver_prefill_attention(
        p(case.qkv[start:]),
        ctypes.c_int64(case.qkv.shape[1]),
        ctypes.byref(heads),
        ctypes.byref(pages),
        p(case.table),
        start,
        count,
        p(layout),
        scored,
        p(mass),
        p(out),
        ctypes.c_int64(case.heads * case.width),
        p(room),
    )
    return out


@relaxed
@given(case=cases(1300), with_weights=st.booleans())
def test_decode_is_attention_over_the_sequences_own_pages(
    native: ctypes.CDLL, case: Case, with_weights: bool
) -> None:
    out, weights = decode(native, case, with_weights)
    expected, size = case.attention(case.context - 1)
    assert ((out - expected[0]).abs() <= 2e-5 * size[0] + 1e-6).all()
    if weights is not None:
        p_expected = case.softmax(case.context - 1)[0]
        torch.testing.assert_close(weights[:, : case.context].double(), p_expected, rtol=5e-5, atol=1e-9)
        assert weights[:, case.context :].isnan().all()  # nothing is written beyond the context


@relaxed
@given(case=cases(1300), with_weights=st.booleans())
def test_decode_in_parts_gives_the_same_bits(native: ctypes.CDLL, case: Case, with_weights: bool) -> None:
    whole, weights = decode(native, case, with_weights)
    merged, merged_weights = decode_in_parts(native, case, with_weights)
    assert torch.equal(whole, merged)
    if weights is not None and merged_weights is not None:
        assert torch.equal(weights[:, : case.context], merged_weights[:, : case.context])


@relaxed
@given(case=cases(200), data=st.data())
def test_prefill_is_causal_attention_of_a_chunk(native: ctypes.CDLL, case: Case, data: st.DataObject) -> None:
    case.qkv.copy_(case.qkv.bfloat16())  # so that rounding q, as matrix tiles do, changes nothing
    start = data.draw(st.integers(case.prefix, case.context - 1))
    out = prefill(native, case, start)
    expected, size = case.attention(start)
    # Matrix tiles take widths of whole 32s and round each weight to bf16.
    bound = 2e-5 + (BF16 if case.width % 32 == 0 else 0)
    assert ((out - expected).abs() <= bound * size + 1e-6).all()


@relaxed
@given(case=cases(200), data=st.data())
def test_prefill_does_not_depend_on_how_a_prompt_is_cut(
    native: ctypes.CDLL, case: Case, data: st.DataObject
) -> None:
    case = replace(case, holed=0.0)
    start = data.draw(st.integers(0, case.context - 1))
    assert torch.equal(prefill(native, case, 0)[start:], prefill(native, case, start))


@relaxed
@given(case=cases(200), data=st.data())
def test_mass_is_what_the_last_queries_attend_to(
    native: ctypes.CDLL, case: Case, data: st.DataObject
) -> None:
    case.qkv.copy_(case.qkv.bfloat16())
    start = data.draw(st.integers(case.prefix, case.context - 1))
    scored = data.draw(st.integers(start, case.context - 1))
    mass = torch.zeros(-(-case.context // 32) * 32)
    prefill(native, case, start, scored, mass)
    expected = case.softmax(scored).sum((0, 1))[case.alive]
    found = mass[: int(case.alive.sum())].double()
    assert ((found - expected).abs() <= 2 * BF16 * expected + 1e-6).all()
    assert mass[int(case.alive.sum()) :].abs().sum() == 0


def test_a_long_prompts_last_chunk(native: ctypes.CDLL) -> None:
    case = Case(context=2500, groups=1, share=3, width=64, page_size=16, window=0, seed=3, loudness=1.0)
    case.qkv.copy_(case.qkv.bfloat16())
    expected, size = case.attention(2401)
    assert ((prefill(native, case, 2401) - expected).abs() <= (BF16 + 2e-5) * size).all()


@relaxed
@given(
    case=cases(40),
    extras=st.booleans(),
    only=st.one_of(st.none(), st.integers(0, 3)),
    position=st.integers(0, 49),
)
def test_a_token_is_rotated_and_stored(
    native: ctypes.CDLL, case: Case, extras: bool, only: int | None, position: int
) -> None:
    heads, pages = case.structures()
    width, both = case.width, case.heads + case.groups
    slot = position % (case.keys.shape[0] * case.page_size)
    groups = range(case.groups) if only is None else [only % case.groups]
    angles = torch.arange(50)[:, None] * 0.3 ** torch.arange(width // 2)
    cos, sin = angles.cos(), angles.sin()
    row = case.qkv[0].clone()
    random = torch.Generator().manual_seed(case.seed)
    bias, q_norm, k_norm = (torch.randn(n, generator=random) for n in (len(row), width, width))

    expected = row.view(-1, width).clone()
    x = (row + bias if extras else row).view(-1, width)
    q, k = x[: case.heads], x[case.heads : both]
    if extras:
        q, k = reference.rms_norm(q, q_norm, 1e-5), reference.rms_norm(k, k_norm, 1e-5)
    rotated = reference.rope(torch.cat((q, k))[None], cos[position, None, None], sin[position, None, None])[0]
    keys, values = case.keys.clone(), case.values.clone()
    for group in groups:
        mine = slice(group * case.share, (group + 1) * case.share)
        expected[mine], expected[case.heads + group] = rotated[mine], rotated[case.heads + group]
        expected[both + group] = x[both + group]
        keys.view(-1, case.groups, width)[slot, group] = rotated[case.heads + group].bfloat16()
        values.view(-1, case.groups, width)[slot, group] = x[both + group].bfloat16()

    extra = (p(bias), p(q_norm), p(k_norm)) if extras else (None, None, None)
    rotary = Rotary(*extra, p(cos), p(sin))
    native.quaver_rotate_and_store(
        p(row),
        ctypes.byref(heads),
        ctypes.byref(rotary),
        ctypes.byref(pages),
        position,
        ctypes.c_int64(slot),
        -1 if only is None else groups[0],
    )
    torch.testing.assert_close(row.view(-1, width), expected, rtol=1e-5, atol=1e-4)
    # fp32 results a hair apart may round to neighbouring bf16 values.
    torch.testing.assert_close(case.keys, keys, rtol=2 * BF16, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(case.values, values, rtol=2 * BF16, atol=1e-4, equal_nan=True)
