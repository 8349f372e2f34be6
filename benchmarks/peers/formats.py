"""GGUF files in the formats that llama.cpp is measured in, made by its own quantiser and kept.

Every format comes from the same source as ours: the model's file, dequantised to float32.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Where made files are kept; they are derived, so deleting them costs a minute.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "quaver" / "benchmarks"
FORMATS = ("Q4_0", "Q8_0", "BF16")


def gguf_in(name: str, source: Path, cache: Path = CACHE) -> Path:
    """Return `source` in the format `name` (one of FORMATS, or ALL_F32), made when it is not there.

    Raises RuntimeError when the quantiser refuses.
    """
    made = cache / f"{source.stem}.from-{source.stat().st_size}.{name}.gguf"
    if made.exists():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    whole = source if name == "ALL_F32" else gguf_in("ALL_F32", source, cache)
    part = made.with_suffix(f".{os.getpid()}.part")
    try:
        _quantise(whole, part, name)
        part.replace(made)
    finally:
        part.unlink(missing_ok=True)
    return made


def _quantise(source: Path, target: Path, name: str) -> None:
    from llama_cpp import llama_cpp as api  # noqa: PLC0415 - an extra

    constant = "LLAMA_FTYPE_ALL_F32" if name == "ALL_F32" else f"LLAMA_FTYPE_MOSTLY_{name}"
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, constant)
    params.nthread = os.cpu_count() or 1
    params.allow_requantize = True  # float32 from the shipped 4 bits; nothing is quantised twice after that
    status = api.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if status != 0:
        raise RuntimeError(f"llama.cpp's quantiser returned {status} for {source} as {name}")
