"""Finds or compiles the native kernels for one instruction set.

A library is compiled once for each source, instruction set and compiler, into the user's cache. It
is written under a temporary name and renamed, so that processes starting together do no harm.

To open a library is to run it, and to open half of one kills the process. So each ends with a seal over
its name and content, without which it counts as absent, and a cache that others can write is refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.settings import cores

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
#: A server waits two minutes for its model process. What takes longer is compiled ahead, by `main`.
_COMPILE_S = 90
_COMPILE_AHEAD_S = 3600
_ANSWER_S = 10
_LEFT_BEHIND_S = 2 * _COMPILE_AHEAD_S
_SEAL_BYTES = hashlib.sha256().digest_size


class BuildError(RuntimeError):
    """The native kernels cannot be had here; the message says why and what to do."""


def instruction_sets() -> list[str]:
    """Return those that this machine runs, the fastest first."""
    flags = _cpu_flags()
    return [name for name, (needed, _) in _known().items() if needed <= flags]


def library(isa: str, cache: Path) -> Path:
    """Return the compiled library of an instruction set, compiling it if it is not in `cache`.

    Raises BuildError without a C++ compiler, when the compiler fails or takes too long, and for a
    cache that is not ours alone.
    """
    found = find(isa, cache)
    if found is None:
        compiler = _compiler()
        found = _cached(isa, _private(cache), compiler)
        log.warning("compiling the native kernels for %s, once; this takes up to a minute", isa)
        _compile(compiler, _flags(isa), found, _COMPILE_S)
    return found


def find(isa: str, cache: Path) -> Path | None:
    """Return the library of an instruction set if there is one; BuildError when none can come to be."""
    shipped = _shipped(isa)
    if _sealed(shipped):
        return shipped
    folder = _private(cache)
    try:
        cached = _cached(isa, folder, _compiler())
    except BuildError:
        # A compiler that is gone takes nothing away from what it compiled.
        others = filter(_sealed, sorted(folder.glob(f"{_stem(isa)}-*.so")))
        if other := next(others, None):
            return other
        raise
    return cached if _sealed(cached) else None


def _stem(isa: str) -> str:
    return f"quaver-{isa}-{_digest(_flags(isa))}"


def _cached(isa: str, folder: Path, compiler: list[str]) -> Path:
    version = _run(compiler, "--version", until=time.monotonic() + _ANSWER_S)
    return folder / f"{_stem(isa)}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"


def _shipped(isa: str) -> Path:
    """Where a compiled library lies inside the package, if somebody put it there."""
    return SOURCES.parent / "lib" / f"{_stem(isa)}.so"


def _flags(isa: str) -> tuple[str, ...]:
    return (*_COMMON, *_known()[isa][1])


def _private(cache: Path) -> Path:
    """Return the cache's folder, which need not exist; BuildError if others can put libraries there."""
    try:
        folder = cache.expanduser()
        found = folder.stat()
    except FileNotFoundError:
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        raise BuildError(f"{cache} cannot be used: {error}; set QUAVER_KERNEL_CACHE") from error
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
        raise BuildError(
            f"others can put programs into {folder}: make it yours alone (chown, chmod 700) and remove "
            "what is in it, or set QUAVER_KERNEL_CACHE to another folder"
        )
    return folder


def _seal(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


def _sealed(library: Path) -> bool:
    """Whether a library is there, whole, and under its own name."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return data[-_SEAL_BYTES:] == _seal(library.name, data[:-_SEAL_BYTES])


def _compile(compiler: list[str], flags: tuple[str, ...], target: Path, seconds: float) -> None:
    """Compile every source on its own, all at once, and link them into `target`."""
    until = time.monotonic() + seconds
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _tidy(target.parent)
        with tempfile.TemporaryDirectory(prefix=target.stem, dir=target.parent) as folder:
            built = Path(folder) / target.name
            sources = sorted(SOURCES.glob("*.cpp"))
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            with ThreadPoolExecutor(cores()) as pool:
                pairs = zip(sources, objects, strict=True)
                runs = [
                    pool.submit(_run, compiler, *flags, "-c", source, "-o", to, until=until)
                    for source, to in pairs
                ]
                for run in runs:
                    run.result()
            _run(compiler, "-shared", "-pthread", *objects, "-o", built, until=until)
            content = built.read_bytes()
            with built.open("ab") as file:
                file.write(_seal(target.name, content))
            built.replace(target)
    except OSError as error:
        raise BuildError(f"{target} cannot be written: {error.strerror or error}") from error


def _tidy(folder: Path) -> None:
    """Remove what compilations that were killed left behind."""
    for left in folder.glob("quaver-*/"):
        if time.time() - left.stat().st_mtime > _LEFT_BEHIND_S:
            shutil.rmtree(left, ignore_errors=True)


def _run(compiler: list[str], *arguments: str | Path, until: float) -> str:
    try:
        process = subprocess.Popen(  # noqa: S603
            [*compiler, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"{compiler[0]} does not run: {error.strerror or error}") from error
    with process:
        try:
            output, complaints = process.communicate(timeout=until - time.monotonic())
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)  # a driver's children hold its pipes open
            raise BuildError(
                f"{compiler[0]} did not end in time; if it is only slow, compile ahead of the start: "
                "python -m engine.kernels.cpu.build"
            ) from error
    if process.returncode:
        raise BuildError(f"{compiler[0]} failed on the native kernels:\n{complaints[-2000:]}")
    return output


def _digest(extra: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update("\0".join(extra).encode())
    return digest.hexdigest()[:16]


def _compiler() -> list[str]:
    """Return the compiler's command, which may have arguments: CXX="ccache g++"."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        name, *arguments = command.split() or [""]
        if found := shutil.which(name):
            return [found, *arguments]
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
        if not _sealed(target):
            _compile(compiler, _flags(isa), target, _COMPILE_AHEAD_S)
        print(target)


if __name__ == "__main__":
    main()
