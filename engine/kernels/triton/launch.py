"""One way to start a kernel, and what all kernels share.

Every launch goes through `launch`, so that a launch can be recorded instead of made: on meta
tensors this gives the exact specialisations a GPU would run, to be compiled without one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Read by `triton.jit` when a kernel is defined: set it before this package is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_WIDEN = tl.constexpr(INTERPRETED)  # the interpreter stores bf16 as integers and cannot multiply them

#: Probabilities below this add nothing to a sum in fp32, and their logarithm is not to be trusted.
NEGLIGIBLE = tl.constexpr(1e-37)


@dataclass(frozen=True, slots=True)
class Block:
    """How a kernel cuts its work: tile sizes (0 where it has no such axis), warps, pipeline stages."""

    m: int = 0
    n: int = 0
    k: int = 0
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded launch: `arguments` by name, tensors and constants alike."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    block: Block


_record: ContextVar[list[Launch] | None] = ContextVar("record", default=None)


def launch(kernel: Any, grid: tuple[int, ...], block: Block, *arguments: Any, **constants: Any) -> None:
    """Run `kernel` over `grid`; positional `arguments` come first, `constants` are compile-time.

    Raises ValueError for a tensor that kernels would misread: see `_laid_out`.
    """
    arguments = tuple(map(_laid_out, arguments))
    record = _record.get()
    if record is not None:
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        record.append(Launch(kernel, grid, named | constants, block))
        return
    kernel[grid](*arguments, **constants, num_warps=block.warps, num_stages=block.stages)


def _laid_out(value: Any) -> Any:
    """Kernels step through rows without gaps: vectors are copied to that end, block tables bring a stride."""
    if not isinstance(value, Tensor) or value.is_contiguous():
        return value
    if value.dim() == 1:
        return value.contiguous()
    if value.dim() == 2 and value.stride(1) == 1 and not value.is_floating_point():
        return value
    raise ValueError(
        f"kernels need contiguous tensors; this {tuple(value.shape)} has strides {value.stride()}"
    )


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within, launches are recorded and not made."""
    launches: list[Launch] = []
    token = _record.set(launches)
    try:
        yield launches
    finally:
        _record.reset(token)


def floats(like: Tensor, *shape: int) -> Tensor:
    """Room for fp32 values on the device of `like`."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def multiprocessors(device: torch.device) -> int:
    """How many blocks run at a time, at least: the GPU's multiprocessors, an A100's without one."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 108


@triton.jit
def dot(a, b, total):
    """`total` + a·b in fp32. fp32 operands keep their precision: three tf32 products each."""
    if _WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    if a.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision="tf32x3")
    return tl.dot(a, b, total)


@triton.jit
def widened(codes, values):
    """Weights in the type of the `values` that they multiply; int8 fits without loss."""
    if _WIDEN:
        return codes.to(tl.float32)
    return codes.to(values.dtype)
