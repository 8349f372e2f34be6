"""Weights as a checkpoint stores them: bytes in blocks along each row, float32 on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

#: Values in a block and bytes in a block, for every kind that GGUF and safetensors files hold here.
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
}
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A weight as stored. `shape` is (out, in), or (n,) for norms and biases.

    `kind` is a key of `BLOCKS`. `data` are the bytes, uint8 of shape (out, bytes per row) or
    (bytes,): rows are contiguous, blocks lie inside a row. It is a view of the mapped file
    wherever the file has the rows in our order; never write to it.
    """

    kind: str
    shape: tuple[int, ...]
    data: Bytes

    def tensor(self) -> Tensor:
        """Return the values as a new contiguous float32 CPU tensor of `shape`."""
        import torch  # noqa: PLC0415  config and tokenizer load without it

        if self.kind in _FLOATS:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[self.kind]
            return torch.from_numpy(self.data.copy()).view(dtype).float()
        import gguf  # noqa: PLC0415  slow to import, and only this needs it

        values = gguf.quants.dequantize(self.data, gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(self.shape)

    def reordered(self, rows: np.ndarray[Any, np.dtype[np.intp]]) -> StoredWeight:
        """Return a copy whose row i is this weight's row `rows[i]`."""
        return StoredWeight(self.kind, self.shape, self.data[rows])


def stored(tensor: Tensor) -> StoredWeight:
    """Return a CPU tensor as a weight that shares its memory; ValueError unless fp32, fp16 or bf16."""
    import torch  # noqa: PLC0415  config and tokenizer load without it

    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if tensor.dtype not in kinds:
        raise ValueError(f"{tensor.dtype} is none of {', '.join(_FLOATS)}")
    return StoredWeight(kinds[tensor.dtype], tuple(tensor.shape), tensor.view(torch.uint8).numpy())


def row_bytes(kind: str, width: int) -> int:
    """Return the bytes of a row of `width` values; raises ValueError when its blocks do not fit."""
    values, size = BLOCKS[kind]
    if width % values:
        raise ValueError(f"a row of {width} values is no whole number of {kind} blocks")
    return width // values * size
