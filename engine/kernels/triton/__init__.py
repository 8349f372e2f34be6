"""The GPU backend: the reference's functions as Triton kernels, and fused ones beside them.

What a GPU does well in plain PyTorch, or what the fused kernels make needless, is the
reference's own function. Importing needs the `triton` package; `check` says whether it can run.
"""

from __future__ import annotations

import torch

from engine.kernels.reference import (
    attention_mass,
    draw,
    entropy,
    gather,
    rope,
    silu_mul,
    token_statistics,
    write_kv,
)
from engine.kernels.triton.decode import attend_decode, decode_attention
from engine.kernels.triton.head import lm_head
from engine.kernels.triton.heads import head_statistics
from engine.kernels.triton.launch import INTERPRETED
from engine.kernels.triton.norm import add_rms_norm, rms_norm
from engine.kernels.triton.pack import pack_keys, pack_values, unpack_keys, unpack_values
from engine.kernels.triton.prefill import attend_prefill, prefill_attention
from engine.kernels.triton.products import linear
from engine.kernels.triton.rotary import rope_write

__all__ = [
    "INTERPRETED",
    "add_rms_norm",
    "attend_decode",
    "attend_prefill",
    "attention_mass",
    "check",
    "decode_attention",
    "draw",
    "entropy",
    "gather",
    "head_statistics",
    "linear",
    "lm_head",
    "pack_keys",
    "pack_values",
    "prefill_attention",
    "rms_norm",
    "rope",
    "rope_write",
    "silu_mul",
    "token_statistics",
    "unpack_keys",
    "unpack_values",
    "write_kv",
]

#: The first GPUs with tensor cores for bf16 and tf32.
LEAST_CAPABILITY = (8, 0)


def check() -> None:
    """Raise RuntimeError, saying what is missing, where these kernels cannot run."""
    if INTERPRETED:
        return
    if not torch.cuda.is_available():
        raise RuntimeError(
            "the triton backend needs an NVIDIA GPU that PyTorch can use, and there is none; "
            "use QUAVER_BACKEND=auto, or set TRITON_INTERPRET=1 before the start to run the kernels, "
            "very slowly, in Triton's interpreter"
        )
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        raise RuntimeError(
            f"the triton backend needs a GPU of compute capability 8.0 (Ampere) or newer, and this one has "
            f"{capability[0]}.{capability[1]}; use QUAVER_BACKEND=auto"
        )
