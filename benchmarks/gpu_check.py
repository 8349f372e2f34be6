"""Is every Triton kernel right on this GPU? Each against the reference, at the block shapes it would use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels import fused, reference, triton


class Check(NamedTuple):
    """The largest error of a kernel at a use, relative to max(1, |expected|), and what is allowed."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """False for an error that is NaN, too."""
        return self.error <= self.allowed


Checker = Callable[..., Check]


class Sizes(NamedTuple):
    """Heads, key-value heads, their width, hidden width, feed-forward width, vocabulary."""

    heads: int
    groups: int
    width: int
    hidden: int
    inner: int
    vocab: int


SIZES = (Sizes(9, 3, 64, 576, 1536, 49152), Sizes(32, 8, 128, 1024, 2816, 32000))
PAGE = 16
#: One rounding of the result, and of the softmax weights in attention.
ALLOWED = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def checks(device: torch.device, sizes: Sizes, dtype: torch.dtype, contexts: list[int]) -> Iterator[Check]:
    """Check every kernel for decodes at `contexts` and for a chunk that ends at the longest of them."""
    torch.manual_seed(0)
    allowed = ALLOWED[dtype]
    label = f"heads of {sizes.width}, {str(dtype).removeprefix('torch.')}"

    def check(name: str, found: Tensor, expected: Tensor, limit: float = allowed) -> Check:
        return Check(f"{name} ({label})", error(found, expected), limit)

    rows = len(contexts)
    x = torch.randn(rows, sizes.hidden, device=device)
    delta = torch.randn_like(x).to(dtype)
    gain = torch.rand(sizes.hidden, device=device) + 0.5
    sums = x.clone(), x.clone()
    normed = triton.add_rms_norm(sums[0], delta, gain, 1e-5, dtype)
    yield check("add + norm", normed, fused.add_rms_norm(sums[1], delta, gain, 1e-5, dtype))
    yield check("residual", *sums, 0.0)
    yield from _products(check, sizes, dtype, normed)
    long = torch.randn(max(contexts), sizes.hidden, device=device).to(dtype)
    yield from _products(check, sizes, dtype, long)
    yield from _attention(check, sizes, dtype, contexts, device)
    head = (torch.randn(sizes.vocab, sizes.hidden, device=device) / sizes.hidden**0.5).to(dtype)
    for hidden in (x, long.float()):
        tokens = torch.randint(-1, sizes.vocab, (len(hidden),), device=device)
        found = triton.lm_head(hidden, head, tokens, 8)
        expected = fused.lm_head(hidden, head, tokens, 8)
        for name in ("lse", "entropy", "top_logits", "chosen"):
            yield check(
                f"LM head {name}, {len(hidden)} rows", getattr(found, name), getattr(expected, name), 2e-4
            )


def error(found: Tensor, expected: Tensor) -> float:
    """Largest |found − expected| / max(1, |expected|); equal NaNs are no error, others are NaN."""
    found, expected = found.double(), expected.double()
    both = found.isnan() & expected.isnan()
    difference = ((found - expected).abs() / expected.abs().clamp_min(1)).masked_fill(both, 0)
    return float(difference.max()) if difference.numel() else 0.0


def _products(check: Checker, sizes: Sizes, dtype: torch.dtype, x: Tensor) -> Iterator[Check]:
    for activation in (None, "relu", "gelu", "silu_mul"):
        stored = sizes.inner * (2 if activation == "silu_mul" else 1)
        weight = torch.randn(stored, sizes.hidden, device=x.device) / sizes.hidden**0.5
        bias, scale = torch.randn(stored, device=x.device), weight.abs().amax(1) / 127
        codes = (weight / scale[:, None]).round().to(torch.int8)
        for name, held, scales in (("", weight.to(dtype), None), (" int8", codes, scale)):
            found = triton.linear(x, held, bias, activation, scales)
            expected = fused.linear(x, held, bias, activation, scales)
            yield check(f"product{name} {activation or 'plain'}, {len(x)} rows", found, expected)


def _attention(
    check: Checker, sizes: Sizes, dtype: torch.dtype, contexts: list[int], device: torch.device
) -> Iterator[Check]:
    heads, groups, width = sizes.heads, sizes.groups, sizes.width
    pages = -(-max(contexts) // PAGE)
    count = len(contexts) * pages + 1
    keys, values = (torch.randn(count, PAGE, groups, width, device=device).to(dtype) for _ in range(2))
    table = torch.randperm(count - 1, device=device).view(len(contexts), pages)
    lengths = torch.tensor(contexts, device=device)
    prompts = (lengths // 2).clamp_min(1)

    angles = torch.rand(max(contexts), 1, width // 2, device=device) * 6
    tables = angles.cos(), angles.sin()
    qkv = torch.randn(len(contexts), heads + 2 * groups, width, device=device).to(dtype)
    places = lengths - 1
    slots = table.gather(1, (places // PAGE)[:, None])[:, 0] * PAGE + places % PAGE
    norms = torch.rand(width, device=device) + 0.5, torch.rand(width, device=device) + 0.5
    plain = keys.clone(), values.clone()
    q = triton.rope_write(qkv, *tables, places, slots, keys, values, norms, 1e-6)
    yield check("rope", q, fused.rope_write(qkv, *tables, places, slots, *plain, norms, 1e-6))
    yield check("keys written", keys, plain[0])
    yield check("values written", values, plain[1], 0.0)

    wide = keys.float(), values.float()
    attended = triton.attend_decode(q, keys, values, table, lengths)
    expected = fused.attend_decode(q.float(), *wide, table, lengths)
    for name, found, wanted in zip(attended._fields, attended, expected, strict=True):
        yield check(f"decode {name}", found, wanted, ALLOWED[dtype] if name == "out" else 1e-3)
    for name, lse in (("", None), (" with lse", attended.lse)):
        found = triton.head_statistics(q, keys, table, lengths, prompts, lse=lse)
        yield check(
            f"head statistics{name}", found, reference.head_statistics(q, keys, table, lengths, prompts), 1e-3
        )
    row = contexts.index(max(contexts))
    for start in (0, max(contexts) // 3):
        queries = torch.randn(max(contexts) - start, heads, width, device=device).to(dtype)
        attended = triton.attend_prefill(queries, keys, values, table[row : row + 1], start)
        expected = fused.attend_prefill(queries.float(), *wide, table[row : row + 1], start)
        for name, found, wanted in zip(attended._fields, attended, expected, strict=True):
            yield check(
                f"prefill {name} from {start}", found, wanted, ALLOWED[dtype] if name == "out" else 1e-3
            )
    ids, used = table[:, 0], torch.full((len(contexts),), PAGE - 3, device=device)
    for name in ("keys", "values"):
        packed = getattr(triton, f"pack_{name}")(keys, ids, used)
        wanted = getattr(fused, f"pack_{name}")(keys, ids, used)
        yield check(f"pack {name}", packed.codes, wanted.codes, 0.0)
        yield check(f"pack {name} scales", packed.scales, wanted.scales, 1e-6)
        restored, plain_pages = keys.clone(), keys.clone()
        getattr(triton, f"unpack_{name}")(restored, ids, packed)
        getattr(fused, f"unpack_{name}")(plain_pages, ids, packed)
        yield check(f"unpack {name}", restored, plain_pages, 1e-6)
