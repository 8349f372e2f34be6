"""What the kernels cost a GPU, told without one: each launch compiled ahead of time.

The launches are recorded on meta tensors at a model's true shapes, so what is compiled is what a
GPU would run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import triton as kernels
from engine.kernels.triton.launch import INTERPRETED, Launch, recording

ARCHITECTURES = (80, 90)

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Shape(NamedTuple):
    """The sizes of a model that kernels see."""

    name: str
    hidden: int
    heads: int
    groups: int
    width: int
    inner: int
    vocab: int


MODELS = (
    Shape("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152),
    Shape("Llama-3-8B", 4096, 32, 8, 128, 14336, 128256),
)


class Cost(NamedTuple):
    """One kernel at one use: registers a thread, bytes spilled a thread, bytes of shared memory."""

    model: str
    use: str
    kernel: str
    architecture: int
    registers: int
    spilled: int
    shared: int


def launches(model: Shape, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Launch]]:
    """Every launch of a step of `model`, in prefill (2,048 tokens) and in decode (16 sequences)."""
    for use, tokens in (("prefill", 2048), ("decode", 16)):
        with recording() as found:
            _step(model, dtype, tokens, prefill=use == "prefill")
        yield from ((use, launch) for launch in found)
    with recording() as found:
        _pack(model, dtype)
    yield from (("pages", launch) for launch in found)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _step(model: Shape, dtype: torch.dtype, tokens: int, *, prefill: bool) -> None:
    hidden, heads, groups, width = model.hidden, model.heads, model.groups, model.width
    x = _empty(tokens, hidden, dtype=torch.float32)
    gain = _empty(hidden, dtype=torch.float32)
    normed = kernels.add_rms_norm(x, _empty(tokens, hidden, dtype=dtype), gain, 1e-5, dtype)
    qkv = kernels.linear(normed, _empty((heads + 2 * groups) * width, hidden, dtype=dtype))
    pages = _empty(4096, 16, groups, width, dtype=dtype)
    tables = _empty(8192, 1, width // 2, dtype=torch.float32)
    places = _empty(tokens, dtype=torch.int64)
    q = kernels.rope_write(qkv.view(tokens, -1, width), tables, tables, places, places, pages, pages)
    if prefill:
        attended = kernels.attend_prefill(q, pages, pages, _empty(1, 128, dtype=torch.int64), 512)
    else:
        table, lengths = _empty(tokens, 128, dtype=torch.int64), _empty(tokens, dtype=torch.int64)
        attended = kernels.attend_decode(q, pages, pages, table, lengths)
        kernels.head_statistics(q, pages, table, lengths, lengths, lse=attended.lse)
    kernels.linear(attended.out.view(tokens, -1), _empty(hidden, heads * width, dtype=dtype))
    gate_up = _empty(2 * model.inner, hidden, dtype=dtype)
    activated = kernels.linear(normed, gate_up, activation="silu_mul")
    kernels.linear(activated, _empty(hidden, model.inner, dtype=dtype))
    scale = _empty(2 * model.inner, dtype=torch.float32)
    kernels.linear(
        normed, _empty(*gate_up.shape, dtype=torch.int8), scale, activation="silu_mul", scale=scale
    )
    kernels.linear(normed, _empty(*gate_up.shape, dtype=torch.int8), scale, activation="gelu", scale=scale)
    rows = _empty(128 if prefill else tokens, hidden, dtype=torch.float32)
    for held in (torch.float32, dtype):
        kernels.lm_head(rows, _empty(model.vocab, hidden, dtype=held), places[: len(rows)], top=32)


def _pack(model: Shape, dtype: torch.dtype) -> None:
    pages = _empty(4096, 16, model.groups, model.width, dtype=dtype)
    ids = _empty(64, dtype=torch.int64)
    for pack, unpack in (
        (kernels.pack_keys, kernels.unpack_keys),
        (kernels.pack_values, kernels.unpack_values),
    ):
        unpack(pages, ids, pack(pages, ids, ids))


def source(launch: Launch) -> ASTSource:
    """The specialisation that the launcher would make of these arguments: types, ones, alignment."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
        else:
            signature[parameter.name] = "fp32"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def cost(model: str, use: str, launch: Launch, architecture: int) -> Cost:
    """Compile one launch for sm_`architecture`. Raises RuntimeError under the interpreter."""
    if INTERPRETED:
        raise RuntimeError("unset TRITON_INTERPRET to compile: interpreted kernels have no machine code")
    options = {"num_warps": launch.block.warps, "num_stages": launch.block.stages}
    compiled = triton.compile(source(launch), target=GPUTarget("cuda", architecture, 32), options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    name = launch.kernel.__name__.strip("_")
    where = launch.kernel.fn.__module__.rsplit(".", 1)[-1]
    return Cost(model, use, f"{where}.{name}", architecture, registers, spilled, compiled.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory a thread, as the linker's own tool reports them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "-res-usage", str(path)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  Triton's own
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", run.stdout)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def costs(*models: Shape, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> Iterator[Cost]:
    """Compile every distinct launch of these models, with weights of these types, for every architecture."""
    seen = set()
    for model, dtype in product(models, dtypes):
        for use, launch in launches(model, dtype):
            key = (source(launch).hash(), launch.block)
            if key not in seen:
                seen.add(key)
                name = f"{model.name} {str(dtype).removeprefix('torch.')}"
                yield from (cost(name, use, launch, number) for number in ARCHITECTURES)
