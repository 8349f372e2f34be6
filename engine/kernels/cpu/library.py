"""Opens the native kernels and tells ctypes about them. Structures mirror `src/model.h`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

from engine.kernels.cpu import build
from engine.models.step import TOP

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
PARTS = (
    "qkv",
    "output",
    "gate",
    "up",
    "down",
    "embedding",
    "head",
    "attention_norm",
    "feed_forward_norm",
    "final_norm",
    "qkv_bias",
    "q_norm",
    "k_norm",
)

#: A row of the LM head's statistics.
ROW = np.dtype(
    [
        ("lse", np.float32),
        ("entropy", np.float32),
        ("ids", np.int32, (TOP,)),
        ("values", np.float32, (TOP,)),
    ]
)


class Config(ctypes.Structure):
    """Sizes of a model and how it is held."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                "vocab",
                "hidden",
                "layers",
                "heads",
                "groups",
                "width",
                "intermediate",
                "positions",
                "window",
                "bits",
                "head_bits",
                "tied",
                "threads",
            )
        ),
        ("norm_eps", c_float),
        ("compensation", c_float),
    ]


class Batch(ctypes.Structure):
    """One step; the arrays belong to the caller."""

    _fields_ = [
        *((name, c_int32) for name in ("tokens", "spans", "table_width", "rows", "details", "layers")),
        *(
            (name, c_void_p)
            for name in (
                "token_ids",
                "slots",
                "offset",
                "count",
                "start",
                "tables",
                "row_tokens",
                "detail_spans",
                "prompt_lengths",
                "detail_layers",
                "keys",
                "values",
            )
        ),
        ("layer_stride", c_int64),
        ("page_size", c_int32),
        ("scored_layers", c_int32),
        ("scored", c_void_p),
        ("dead", c_void_p),
    ]


class Outputs(ctypes.Structure):
    """Where a step's results go."""

    _fields_ = [
        *((name, c_void_p) for name in ("rows", "keep", "lens_entropy", "heads", "mass", "hidden")),
        ("head_seconds", c_double),
        ("detail_seconds", c_double),
    ]


@cache
def open_library(isa: str, cache_folder: Path) -> ctypes.CDLL:
    """Open the kernels of an instruction set. Raises `build.BuildError`."""
    path = build.library(isa, cache_folder)
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing
        raise build.BuildError(
            f"{path} cannot be loaded: {error}; remove it and start again, or set QUAVER_KERNEL_CACHE to "
            "a folder that programs may run from"
        ) from error


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.quaver_model_create.restype = c_void_p
    library.quaver_model_create.argtypes = [POINTER(Config), c_void_p, c_void_p]
    library.quaver_model_destroy.argtypes = [c_void_p]
    library.quaver_model_matrix.argtypes = [c_void_p, *[c_int] * 5, c_void_p]
    library.quaver_model_vector.argtypes = [c_void_p, c_int, c_int, c_void_p, c_int]
    library.quaver_step.argtypes = [c_void_p, POINTER(Batch), POINTER(Outputs)]
    library.quaver_head.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
    library.quaver_draw.argtypes = [c_void_p, c_void_p, c_int, c_int, *[c_void_p] * 5]
    for function in (library.quaver_pack_block, library.quaver_unpack_block):
        function.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_int, c_int, c_int, c_void_p]
    library.quaver_unpack_block.restype = None
    library.quaver_checksum.restype = c_uint64
    library.quaver_checksum.argtypes = [c_void_p, c_int64]
    library.quaver_rows_statistics.argtypes = [c_void_p, c_void_p, c_int, c_int, c_void_p, c_void_p]
    return library
