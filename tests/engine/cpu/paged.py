"""One sequence in random pages, its attention in fp64 and by the native kernels."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, settings
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
        ("dead", ctypes.c_void_p),
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
    """One sequence whose keys and values lie in random pages, with garbage in every slot it does not own.

    Of its first `prefix` tokens some are dead, if `holed`: garbage is in their slots too.
    """

    context: int
    groups: int
    share: int
    width: int
    page_size: int
    window: int
    seed: int
    loudness: float
    prefix: int = 0
    holed: float = 0.0  # share of these that is dead, about

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        used = -(-self.context // self.page_size)
        total = used + 2
        shape = (total, self.page_size, self.groups, self.width)
        place = torch.randperm(total, generator=random)[:used]
        slots = torch.arange(self.context)
        slots = place[slots // self.page_size] * self.page_size + slots % self.page_size
        alive = (torch.rand(self.context, generator=random) >= self.holed) | (
            torch.arange(self.context) >= self.prefix
        )
        dead = torch.zeros(total * self.page_size, dtype=torch.uint8)
        dead[slots[~alive]] = 1
        pages = []
        for garbage in (float("nan"), float("inf")):
            filled = torch.full(shape, garbage, dtype=torch.bfloat16)
            own = torch.randn(self.context, self.groups, self.width, generator=random)
            filled.view(-1, self.groups, self.width)[slots[alive]] = own.bfloat16()[alive]
            pages.append(filled)
        rows = torch.randn(self.context, (self.heads + 2 * self.groups) * self.width, generator=random)
        object.__setattr__(self, "keys", pages[0])
        object.__setattr__(self, "values", pages[1])
        object.__setattr__(self, "table", place.to(torch.int32))
        object.__setattr__(self, "qkv", rows * self.loudness)
        object.__setattr__(self, "alive", alive)
        object.__setattr__(self, "dead", dead.view(total, self.page_size))

    keys: Tensor = field(init=False)
    values: Tensor = field(init=False)
    table: Tensor = field(init=False)
    qkv: Tensor = field(init=False)
    alive: Tensor = field(init=False)  # bool [context]
    dead: Tensor = field(init=False)  # uint8 [pages, page size]

    @property
    def heads(self) -> int:
        return self.groups * self.share

    def structures(self) -> tuple[Heads, Pages]:
        """What the native functions take."""
        heads = Heads(self.heads, self.groups, self.width, self.window, 1e-5)
        dead = None if self.alive.all() else self.dead.data_ptr()
        sizes = self.page_size, self.groups, self.width
        return heads, Pages(self.keys.data_ptr(), self.values.data_ptr(), *sizes, dead)

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
        seen = (at <= own) & ((at > own - self.window) | (self.window == 0)) & self.alive
        return (scores / math.sqrt(self.width)).masked_fill(~seen[:, None], float("-inf")).softmax(-1)

    def attention(self, first: int) -> tuple[Tensor, Tensor]:
        """Attention of positions `first` …, and the sizes of what is summed: [rows, H, D] fp64 each."""
        v = reference.gather(self.values, self.table[None].long())[0, :, : self.context].double()
        v[:, ~self.alive] = 0
        v = v.repeat_interleave(self.share, 0)
        weights = self.softmax(first)
        return torch.einsum("thk,hkd->thd", weights, v), torch.einsum("thk,hkd->thd", weights, v.abs())


@st.composite
def cases(draw: st.DrawFn, longest: int) -> Case:
    context = draw(st.integers(1, longest))
    return Case(
        context=context,
        prefix=draw(st.integers(0, context - 1)),
        holed=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
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


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
