"""Finds or compiles the native kernels for one instruction set.

A library is compiled once for each source, instruction set and compiler, into the user's cache. It
is written under a temporary name and renamed, so that processes starting together do no harm.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger("quaver.model")

SOURCES = Path(__file__).parent / "src"

#: Instruction sets from the fastest to the plainest: what /proc/cpuinfo must list, compiler flags.
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_X86: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (
        frozenset(
            {
                "avx512_vnni",
                "avx512bw",
                "avx512dq",
                "avx512vl",
                "avx512_bf16",
                "amx_tile",
                "amx_bf16",
                "amx_int8",
            }
        ),
        (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-mprefer-vector-width=512"),
    ),
    "avx512": (
        frozenset({"avx512_vnni", "avx512bw", "avx512dq", "avx512vl"}),
        (*_AVX512, "-mprefer-vector-width=512"),
    ),
    "avx2": (frozenset({"avx2", "fma", "f16c"}), _AVX2),
    "base": (frozenset(), ()),
}
_ARM: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "dotprod": (frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod+fp16",)),
    "base": (frozenset(), ()),
}
_COMMON = (
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fPIC",
    "-pthread",
    "-w",
)
_COMPILE_S = 300


class BuildError(RuntimeError):
    """The native kernels cannot be had here; the message says why and what to do."""


def instruction_sets() -> list[str]:
    """Return those that this machine runs, the fastest first."""
    flags = _cpu_flags()
    return [name for name, (needed, _) in _known().items() if needed <= flags]


def library(isa: str, cache: Path) -> Path:
    """Return the compiled library of an instruction set, compiling it if it is not in `cache`.

    Raises BuildError without a C++ compiler or when the compiler fails.
    """
    found = find(isa, cache)
    if found is None:
        compiler = _compiler()
        found = _cached(isa, cache, compiler)
        log.warning("compiling the native kernels for %s, once; this takes up to a minute", isa)
        _compile(compiler, _flags(isa), found)
    return found


def find(isa: str, cache: Path) -> Path | None:
    """Return the library of an instruction set if there is one; BuildError when none can come to be."""
    shipped = _shipped(isa)
    if shipped.exists():
        return shipped
    cached = _cached(isa, cache, _compiler())
    return cached if cached.exists() else None


def _cached(isa: str, cache: Path, compiler: str) -> Path:
    version = _run(compiler, "--version")
    return cache.expanduser() / f"quaver-{isa}-{_digest((*_flags(isa), version))}.so"


def _shipped(isa: str) -> Path:
    """Where a compiled library lies inside the package, if somebody put it there."""
    return SOURCES.parent / "lib" / f"quaver-{isa}-{_digest(_flags(isa))}.so"


def _flags(isa: str) -> tuple[str, ...]:
    return (*_COMMON, *_known()[isa][1])


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Compile every source on its own, all at once, and link them into `target`."""
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=target.stem, dir=target.parent) as folder:
            built = Path(folder) / target.name
            sources = sorted(SOURCES.glob("*.cpp"))
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                pairs = zip(sources, objects, strict=True)
                runs = [pool.submit(_run, compiler, *flags, "-c", source, "-o", to) for source, to in pairs]
                for run in runs:
                    run.result()
            _run(compiler, "-shared", "-pthread", *objects, "-o", built)
            built.replace(target)
    except OSError as error:
        raise BuildError(f"{target} cannot be written: {error.strerror or error}") from error


def _run(compiler: str, *arguments: str | Path) -> str:
    command = [compiler, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler} took more than {_COMPILE_S} s for a native kernel") from error
    except OSError as error:
        raise BuildError(f"{compiler} does not run: {error.strerror or error}") from error
    if done.returncode:
        raise BuildError(f"{compiler} failed on the native kernels:\n{done.stderr[-2000:]}")
    return done.stdout


def _digest(extra: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update("\0".join(extra).encode())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler is installed (apt-get install g++)")


def _known() -> dict[str, tuple[frozenset[str], tuple[str, ...]]]:
    return _ARM if platform.machine() in ("aarch64", "arm64") else _X86


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def main() -> None:
    """Compile for every instruction set of this architecture into the package, for an image or a wheel."""
    compiler = _compiler()
    for isa in _known():
        target = _shipped(isa)
        target.parent.mkdir(exist_ok=True)  # readable by all, unlike a user's cache
        if not target.exists():
            _compile(compiler, _flags(isa), target)
        print(target)


if __name__ == "__main__":
    main()
