"""The engine's own settings; `quaver` composes them with those of the other packages.

Every field is an environment variable `QUAVER_<FIELD>`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class EngineSettings(BaseSettings):
    """Which model runs, and within which limits."""

    model_config = SettingsConfigDict(env_prefix="QUAVER_", extra="ignore", frozen=True)

    model: str = Field(
        "smollm2-135m", description="a name from `quaver model list`, a .gguf file or a safetensors folder"
    )
    model_cache: Path = Field(Path("~/.cache/quaver/models"), description="where pulled models live")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of the reference and Triton kernels; auto: bfloat16 where it is multiplied natively",
    )
    backend: Literal["auto", "cpu", "reference", "triton"] = Field(
        "auto",
        description="kernels; auto: Triton's on an NVIDIA GPU, else the native CPU ones where they can be "
        "compiled, else reference",
    )
    cpu_isa: Literal["auto", "amx", "avx512", "avx2", "dotprod", "base"] = Field(
        "auto", description="instruction set of the native kernels; auto: the fastest that this CPU has"
    )
    kernel_cache: Path = Field(Path("~/.cache/quaver/kernels"), description="where compiled kernels live")
    weight_bits: Literal["auto", "4", "8"] = Field(
        "auto", description="bits of a weight in the native kernels; auto: as the file stores them"
    )
    compensation: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the activations' rounding that decoding takes back, for twice the products",
    )
    threads: int = Field(0, ge=0, le=1024, description="compute threads of the model process; 0: all cores")
    max_context: int = Field(8192, ge=16, description="longest prompt + answer, in tokens")
    kv_tokens: int = Field(32768, ge=256, description="size of the KV pool, in tokens")
    page_size: int = Field(16, ge=1, description="tokens in a KV page")
    prefix_cache: bool = Field(
        True, description="keep pages of prompts and answers, for prompts of that tenant that begin alike"
    )
    kv_host_mb: int = Field(
        512,
        ge=0,
        description="MiB of memory for what the KV pool gives up, in 8 bits; 0: off, as with "
        "QUAVER_DETERMINISTIC",
    )
    kv_disk_dir: Path | None = Field(
        None, description="folder for what that memory gives up, read again after a restart; unset: none"
    )
    kv_disk_mb: int = Field(4096, ge=1, description="MiB that the files in QUAVER_KV_DISK_DIR may take")
    kv_policy: Literal["age", "entropy"] = Field(
        "age",
        description="what goes to disk: blocks that nobody has wanted for 0.5 s; entropy: of these only such "
        "that prompts look at with an entropy below 0.3",
    )
    kv_drop: float = Field(
        0.0,
        ge=0,
        le=0.9,
        description="largest share of a prompt's tokens that its blocks leave out, those least attended to; "
        "0: off. Saves memory and disk, costs quality",
    )
    kv_deadline_s: float = Field(
        1.0, gt=0, description="seconds that a prompt waits for the disk before it is computed again"
    )
    max_running: int = Field(16, ge=1, description="choices decoded together")
    max_waiting: int = Field(64, ge=0, description="choices let in beyond the admission pool before 429")
    step_tokens: int = Field(
        512, ge=1, description="tokens computed in one step, prompts and decodes together"
    )
    itl_slo_ms: int = Field(
        200,
        ge=0,
        description="milliseconds between tokens to keep, by cutting prompts into smaller chunks; 0: off",
    )
    deterministic: bool = Field(
        False, description="batch-invariant: an answer depends on its own request alone"
    )
    signal_budget: float = Field(
        0.03,
        ge=0,
        le=1,
        description="share of step time that signals may take; 0: no layer detail, 1: every token and layer",
    )

    @field_validator("page_size")
    @classmethod
    def _a_page_fits(cls, page_size: int, known: ValidationInfo) -> int:
        if page_size > known.data.get("kv_tokens", page_size):
            raise ValueError("a page must fit into QUAVER_KV_TOKENS")
        return page_size

    @property
    def cores(self) -> int:
        """Compute threads: as asked, else the cores that this process may run on."""
        return self.threads or cores()


def cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
