"""The formula for bytes moved against a count of what PyTorch's own operations read and write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

pytest.importorskip("triton", reason="triton is not installed: pip install 'quaver[gpu]'")

from engine.kernels.fused import Activation
from engine.kernels.triton.traffic import linear_traffic

_VIEWS = {"aten::view", "aten::t", "aten::transpose", "aten::unsqueeze", "aten::split", "aten::slice"}


class _Count(TorchDispatchMode):
    """Adds up the bytes of every operand and result, views apart."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name not in _VIEWS:
            leaves = tree_flatten((args, kwargs, result))[0]
            self.bytes += sum(t.numel() * t.element_size() for t in leaves if isinstance(t, Tensor))
        return result


@given(
    rows=st.integers(1, 600),
    inner=st.integers(1, 600),
    outputs=st.integers(1, 600),
    activation=st.sampled_from([None, "relu", "gelu", "silu_mul"]),
    bias=st.booleans(),
    quantized=st.booleans(),
)
@settings(deadline=None)
def test_bytes_of_the_chain(
    *, rows: int, inner: int, outputs: int, activation: Activation | None, bias: bool, quantized: bool
) -> None:
    found = linear_traffic(rows, inner, outputs, activation=activation, bias=bias, quantized=quantized)
    stored = 2 * outputs if activation == "silu_mul" else outputs
    with torch.device("meta"):
        x = torch.empty(rows, inner, dtype=torch.bfloat16)
        weight = torch.empty(stored, inner, dtype=torch.int8 if quantized else torch.bfloat16)
        scale, offset = torch.empty(stored, 1), torch.empty(stored)
    with _Count() as count:
        widened = weight
        if quantized:
            widened = weight.to(torch.bfloat16).mul_(scale)
        y = F.linear(x, widened)
        if bias:
            y.add_(offset)
        if activation == "relu":
            F.relu(y)
        elif activation == "gelu":
            F.gelu(y, approximate="tanh")
        elif activation == "silu_mul":
            gate, up = y.chunk(2, dim=-1)
            F.silu(gate) * up
    assert count.bytes == found.chain
    operands = [x, weight, *([scale] if quantized else []), *([offset] if bias else [])]
    moved = sum(t.numel() * t.element_size() for t in operands) + 2 * rows * outputs
    assert found.fused == moved


def test_what_the_fused_feed_forward_saves() -> None:
    """SmolLM2's gate and up projection over a prompt of 512 tokens: most of the traffic is glue."""
    assert linear_traffic(512, 576, 1536, activation="silu_mul").saved > 0.6
    assert linear_traffic(512, 576, 1536, activation="silu_mul", quantized=True).saved > 0.7
    assert linear_traffic(1, 576, 1536, activation="silu_mul").saved < 0.05
