"""Which engines there are to measure on this machine."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.formats import FORMATS, gguf_in
from benchmarks.peers.ours import DEFAULT_BITS, PLAIN_BITS, bits_there
from benchmarks.rows import Variant, console

WITHOUT_LLAMACPP = (
    "llama-cpp-python is not installed: its rows stay empty. `make bench` builds it, or: "
    "pip install -e '.\\[bench]' (needs cmake and a C++ compiler; takes about ten minutes)"
)


@dataclass(frozen=True)
class Field:
    """Everyone who takes part. `llamacpp` is empty where it is not installed."""

    ours: list[Variant]
    llamacpp: list[Variant]
    plain: Variant  # transformers
    observing: Variant  # transformers, doing what full signals do
    float32: Variant
    bfloat16: Variant  # our reference kernels: the noise that this type makes
    default: Variant  # ours as it comes

    def ours_with(self, signals: str, format: str | None = None) -> list[Variant]:
        """Ours with these signals, of one weight format or of all."""
        return [v for v in self.ours if v.signals == signals and format in (None, v.format)]


def llamacpp_is_there() -> bool:
    """Whether llama.cpp can be asked."""
    return importlib.util.find_spec("llama_cpp") is not None


def gather(model: Path) -> Field:
    """Find out who can take part with the model in `model`, a GGUF file."""
    ours = [
        Variant("ours", "bf16" if bits == PLAIN_BITS else f"{bits}-bit", (("bits", bits),), signals)
        for bits in bits_there()
        for signals in ("off", "budget", "full")
    ]
    llamacpp: list[Variant] = []
    if not llamacpp_is_there():
        console.print(f"[yellow]{WITHOUT_LLAMACPP}")
    else:
        for name in FORMATS:
            console.print(f"[dim]llama.cpp's file in {name}")
            llamacpp.append(Variant("llama.cpp", name, (("path", str(gguf_in(name, model))),)))
    return Field(
        ours,
        llamacpp,
        plain=Variant("transformers", "bf16", ()),
        observing=Variant("transformers", "bf16", (), signals="full"),
        float32=Variant("transformers", "float32", (("dtype", "float32"),)),
        bfloat16=Variant("ours", "bf16", (("bits", PLAIN_BITS),), signals="off"),
        default=Variant("ours", "default", (("bits", DEFAULT_BITS),), signals="budget"),
    )
