"""Where and with what a measurement was made."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Above this share of the machine in other hands, figures are noise.
QUIET = 0.05

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("quaver", "torch", "numpy", "transformers", "llama-cpp-python")
#: Instruction sets that decide how fast matrices are multiplied here.
_TELLING = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_int8", "amx_bf16", "asimddp", "i8mm", "bf16", "sve"),
)


def describe() -> dict[str, Any]:
    """Return the machine, the versions, the commit and the time, ready for JSON."""
    return {
        "machine": _machine(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """The commit of this checkout, `+` behind it when files differ; None where git cannot tell."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _machine() -> dict[str, Any]:
    facts: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return {
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "instructions": [flag for flag in _TELLING if flag in flags],
        "system": platform.platform(),
        "busy": round(_busy(), 3),
    }


def _busy(seconds: float = 0.5) -> float:
    """Share of all cores that others use, while we sleep."""
    before = _ticks()
    time.sleep(seconds)
    (idle, total), (idle_before, total_before) = _ticks(), before
    return 1 - (idle - idle_before) / max(total - total_before, 1)


def _ticks() -> tuple[int, int]:
    ticks = [int(tick) for tick in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
