"""Which implementation runs a model: Triton's on a GPU, else native CPU kernels, else plain PyTorch."""

from __future__ import annotations

import logging
from types import ModuleType

import torch

from engine import kernels
from engine.graphs import CudaRecorder
from engine.kernels.cpu import build, library
from engine.models.device import DeviceModel
from engine.models.fused import Fused
from engine.models.llama import Llama
from engine.models.loader import LoadedModel
from engine.models.native import NativeLlama, fits
from engine.models.step import Model
from engine.settings import EngineSettings

log = logging.getLogger("quaver.model")

_FOUR_BITS = ("Q4_0", "Q4_1")


def model_of(loaded: LoadedModel, settings: EngineSettings) -> Model:
    """Return `loaded` on the backend that `settings` name, ready to step.

    With `auto`, Triton's kernels where there is a GPU, else the native ones, else the reference; one
    warning for each that cannot be had. Raises RuntimeError, saying why, when that one is asked for by
    name.
    """
    if settings.backend == "triton" or (settings.backend == "auto" and torch.cuda.is_available()):
        try:
            ops = kernels.load("triton")
        except RuntimeError as error:
            if settings.backend == "triton":
                raise
            log.warning("the GPU is not used: %s", error)
        else:
            return _triton(loaded, settings, ops)
    if settings.backend == "cpu" or (settings.backend == "auto" and settings.dtype != "float32"):
        try:
            return _native(loaded, settings)
        except build.BuildError as error:
            if settings.backend == "cpu":
                raise
            log.warning("native kernels are not available, decoding will be several times slower: %s", error)
    return _llama(loaded, settings, torch.device("cpu"))


def _triton(loaded: LoadedModel, settings: EngineSettings, ops: ModuleType) -> DeviceModel:
    """The fused step on the GPU, decodes recorded; where the kernels are interpreted, on the CPU as it is."""
    device = torch.device("cpu" if ops.INTERPRETED else "cuda")
    fused = Fused(_llama(loaded, settings, device), ops, device, apart=settings.deterministic)
    if ops.INTERPRETED:
        return DeviceModel(fused, "triton-interpreter")
    major, minor = torch.cuda.get_device_capability()
    return DeviceModel(fused, f"triton-sm{major}{minor}", CudaRecorder())


def _llama(loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> Llama:
    """The weights in the type that suits `device`, held by the CPU."""
    return Llama(
        loaded.config,
        loaded.weights,
        _dtype(settings, device),
        kernels.load("reference"),
        max_context=settings.max_context,
    )


def _native(loaded: LoadedModel, settings: EngineSettings) -> NativeLlama:
    config = loaded.config
    if not fits(config):
        raise build.BuildError(
            f"{config.name} has sizes they do not take: rows must be multiples of 32, heads of 16"
        )
    isa = _instruction_set(settings)
    return NativeLlama(
        config,
        loaded.weights,
        library.open_library(isa, settings.kernel_cache),
        name=f"cpu-{isa}",
        bits=_bits(loaded, settings),
        threads=settings.cores,
        positions=min(settings.max_context, config.max_context),
        compensation=settings.compensation,
    )


def _instruction_set(settings: EngineSettings) -> str:
    there = build.instruction_sets()
    if settings.cpu_isa == "auto":
        return there[0]
    if settings.cpu_isa not in there:
        raise build.BuildError(f"this CPU has no {settings.cpu_isa}; it has: {', '.join(there)}")
    return settings.cpu_isa


def _bits(loaded: LoadedModel, settings: EngineSettings) -> int:
    """Bits of a weight: as asked, or as most of the matrices are stored."""
    if settings.weight_bits != "auto":
        return int(settings.weight_bits)
    kinds = [weight.kind for name, weight in loaded.weights.items() if name.endswith("_proj.weight")]
    return 4 if 2 * sum(kind in _FOUR_BITS for kind in kinds) > len(kinds) else 8


def _dtype(settings: EngineSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        cpu = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        native = cpu or device.type == "cuda"
        return torch.bfloat16 if native else torch.float32
    return torch.float32 if settings.dtype == "float32" else torch.bfloat16
