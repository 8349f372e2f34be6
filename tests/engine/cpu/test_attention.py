"""Rotary positions, paged attention and head statistics of the native kernels against the reference."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import reference

#: bf16 keeps 8 bits: a rounded factor is off by at most this share of itself.
BF16 = 2.0**-8


class Pages(ctypes.Structure):
    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("page_size", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("width", ctypes.c_int),
    ]


class Heads(ctypes.Structure):
    _fields_ = [
        ("heads", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("width", ctypes.c_int),
        ("window", ctypes.c_int),
        ("norm_eps", ctypes.c_float),
    ]


class Rotary(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("bias", "q_norm", "k_norm", "cos", "sin")]


@dataclass(frozen=True)
class Case:
    """One sequence whose keys and values lie in random pages, with garbage in every slot it does not own."""

    context: int
    groups: int
    share: int
    width: int
    page_size: int
    window: int
    seed: int
    loudness: float

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        used = -(-self.context // self.page_size)
        total = used + 2
        shape = (total, self.page_size, self.groups, self.width)
        place = torch.randperm(total, generator=random)[:used]
        slots = torch.arange(self.context)
        slots = place[slots // self.page_size] * self.page_size + slots % self.page_size
        pages = []
        for garbage in (float("nan"), float("inf")):
            filled = torch.full(shape, garbage, dtype=torch.bfloat16)
            own = torch.randn(self.context, self.groups, self.width, generator=random)
            filled.view(-1, self.groups, self.width)[slots] = own.bfloat16()
            pages.append(filled)
        rows = torch.randn(self.context, (self.heads + 2 * self.groups) * self.width, generator=random)
        object.__setattr__(self, "keys", pages[0])
        object.__setattr__(self, "values", pages[1])
        object.__setattr__(self, "table", place.to(torch.int32))
        object.__setattr__(self, "qkv", rows * self.loudness)

    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)
    table: Tensor = field(init=False)
    qkv: Tensor = field(init=False)

    @property
    def heads(self) -> int:
        return self.groups * self.share

    def structures(self) -> tuple[Heads, Pages]:
        """What the native functions take."""
        heads = Heads(self.heads, self.groups, self.width, self.window, 1e-5)
        return heads, Pages(
            self.keys.data_ptr(), self.values.data_ptr(), self.page_size, self.groups, self.width
        )

    def queries(self) -> Tensor:
        """[context, H, D] in fp64."""
        return self.qkv[:, : self.heads * self.width].view(self.context, self.heads, self.width).double()

    def softmax(self, first: int) -> Tensor:
        """Attention weights of positions `first` … in fp64: [rows, H, context]."""
        k = reference.gather(self.keys, self.table[None].long())[0, :, : self.context].double()
        scores: Tensor = torch.einsum(
            "thd,hkd->thk", self.queries()[first:], k.repeat_interleave(self.share, 0)
        )
        own, at = torch.arange(first, self.context)[:, None], torch.arange(self.context)
        seen = (at <= own) & ((at > own - self.window) | (self.window == 0))
        return (scores / math.sqrt(self.width)).masked_fill(~seen[:, None], float("-inf")).softmax(-1)

    def attention(self, first: int) -> tuple[Tensor, Tensor]:
        """Attention of positions `first` …, and the sizes of what is summed: [rows, H, D] fp64 each."""
        v = reference.gather(self.values, self.table[None].long())[0, :, : self.context].double()
        v = v.repeat_interleave(self.share, 0)
        weights = self.softmax(first)
        return torch.einsum("thk,hkd->thd", weights, v), torch.einsum("thk,hkd->thd", weights, v.abs())


@st.composite
def cases(draw: st.DrawFn, longest: int) -> Case:
    return Case(
        context=draw(st.integers(1, longest)),
        groups=draw(st.integers(1, 4)),
        share=draw(st.integers(1, 7)),
        width=draw(st.sampled_from([16, 32, 64, 80, 128])),
        page_size=draw(st.sampled_from([1, 4, 5, 16])),
        window=draw(st.sampled_from([0, 0, 1, 7, 40, 600])),
        seed=draw(st.integers(0, 2**31)),
        loudness=draw(st.sampled_from([0.0, 1.0, 8.0])),
    )


def scratch(size: int) -> Tensor:
    """A buffer whose junk would show."""
    return torch.full((size // 4 + 16,), float("nan"))


def p(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def decode(native: ctypes.CDLL, case: Case, with_weights: bool) -> tuple[Tensor, Tensor | None]:
    """The last position's attention [H, D] and, if wanted, its weights [H, context]."""
    heads, pages = case.structures()
    out = torch.full((case.heads, case.width), float("nan"))
    weights = torch.full((case.heads, case.context + 3), float("nan")) if with_weights else None
    native.quaver_decode_scratch_bytes.restype = ctypes.c_size_t
    room = scratch(native.quaver_decode_scratch_bytes(ctypes.byref(heads), case.context))
    for group in range(case.groups):
        native.quaver_decode_attention(
            p(case.qkv[-1]),
            ctypes.byref(heads),
            ctypes.byref(pages),
            p(case.table),
            case.context - 1,
            group,
            p(out),
            p(weights),
            ctypes.c_int64(case.context + 3),
            p(room),
        )
    return out, weights


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


def prefill(native: ctypes.CDLL, case: Case, start: int) -> Tensor:
    """Attention of positions `start` …: [rows, H, D]."""
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
        p(out),
        ctypes.c_int64(case.heads * case.width),
        p(room),
    )
    return out


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    start = data.draw(st.integers(0, case.context - 1))
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
    start = data.draw(st.integers(0, case.context - 1))
    assert torch.equal(prefill(native, case, 0)[start:], prefill(native, case, start))


def test_a_long_prompts_last_chunk(native: ctypes.CDLL) -> None:
    case = Case(context=2500, groups=1, share=3, width=64, page_size=16, window=0, seed=3, loudness=1.0)
    case.qkv.copy_(case.qkv.bfloat16())
    expected, size = case.attention(2401)
    assert ((prefill(native, case, 2401) - expected).abs() <= (BF16 + 2e-5) * size).all()


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
    case = replace(case, window=0, loudness=case.loudness * loud)  # most weights underflow when loud
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
