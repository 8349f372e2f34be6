"""How compiled kernels are found, made and refused, with small scripts as compilers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.kernels.cpu import build
from engine.kernels.cpu.library import open_library

ISA = "base"
#: Writes its last argument but one's file, `-o FILE`, as a linker does.
MAKES = 'for last; do :; done; [ "$1" = --version ] && echo 1.0 || echo compiled > "$last"'

Script = Callable[[str], Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make a shell script the one C++ compiler that is found."""

    def install(script: str) -> Path:
        path = tmp_path / "cxx"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return install


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda _name: None)


def test_a_library_is_compiled_once_and_leaves_nothing_else(compiler: Script, cache: Path) -> None:
    compiler(MAKES)
    assert build.find(ISA, cache) is None
    made = build.library(ISA, cache)
    assert build.library(ISA, cache) == build.find(ISA, cache) == made
    assert list(cache.iterdir()) == [made]
    assert cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "renamed"])
def test_a_damaged_library_is_compiled_again(damage: str, compiler: Script, cache: Path) -> None:
    """To open one that was cut kills the process with SIGBUS."""
    compiler(MAKES)
    made = build.library(ISA, cache)
    whole = made.read_bytes()
    other = build.library("avx2" if damage == "renamed" else ISA, cache).read_bytes()
    made.write_bytes({"empty": b"", "cut": whole[:-1], "changed": b"X" + whole[1:], "renamed": other}[damage])
    assert build.find(ISA, cache) is None
    assert build.library(ISA, cache) == made
    assert made.read_bytes() == whole


def test_a_compiler_that_is_gone_takes_no_library_away(
    compiler: Script, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(MAKES)
    made = build.library(ISA, cache)
    no_compiler(monkeypatch)
    assert build.library(ISA, cache) == made
    made.write_bytes(b"damaged")
    with pytest.raises(build.BuildError, match="apt-get install"):
        build.library(ISA, cache)


def test_a_compiler_may_have_arguments(
    compiler: Script, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiler(f'[ "$1" = wrapped ] || exit 1; shift; {MAKES}')
    monkeypatch.setenv("CXX", f"{path} wrapped")
    assert build.library(ISA, cache).exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 1", "failed"),
        (r"printf 'gar\377bage' >&2; exit 1", "gar\N{REPLACEMENT CHARACTER}bage"),
        ("yes error | head -c 5000000 >&2; exit 1", "failed"),
        ("exit 0", "cannot be written"),
        ("kill -9 $$", "failed"),
    ],
)
def test_a_compiler_that_fails_is_told_of(script: str, message: str, compiler: Script, cache: Path) -> None:
    compiler(f'[ "$1" = --version ] && echo 1.0 || {{ {script}; }}')
    with pytest.raises(build.BuildError, match=message) as raised:
        build.library(ISA, cache)
    assert len(str(raised.value)) < 3000
    assert not list(cache.iterdir())


@pytest.mark.parametrize("when", ["--version", "-shared"])
def test_a_compiler_that_hangs_ends_with_its_children(
    when: str, compiler: Script, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child holds the compiler's output open, as a driver's real compiler does."""
    monkeypatch.setattr(build, "_ANSWER_S" if when == "--version" else "_COMPILE_S", 1.0)
    child = cache.parent / "child"
    compiler(f'[ "$1" = {when} ] && {{ sleep 600 & echo $! > {child}; wait; }}; {MAKES}')
    with pytest.raises(build.BuildError, match="in time"):
        build.library(ISA, cache)
    stat = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_library_without_our_functions_is_refused(compiler: Script, cache: Path) -> None:
    compiler(
        'for last; do :; done; [ "$1" = --version ] && exit 0; '
        'echo "int x;" | c++ -x c++ -shared -fPIC - -o "$last"'
    )
    with pytest.raises(build.BuildError, match="quaver_model_create"):
        open_library(ISA, cache)


def test_a_cache_that_others_can_write_is_not_run_from(
    compiler: Script, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(MAKES)
    made = build.library(ISA, cache)
    cache.chmod(0o777)
    with pytest.raises(build.BuildError, match="chmod 700"):
        build.library(ISA, cache)
    cache.chmod(0o700)
    assert build.library(ISA, cache) == made
    uid = cache.stat().st_uid
    os.chown(cache, uid or 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(build.BuildError, match="chown"):
        build.library(ISA, cache)


def test_a_cache_that_cannot_be_says_which_variable_to_set(
    compiler: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(MAKES)
    (tmp_path / "file").touch()
    for cache in (Path("~nobody-of-this-name/kernels"), tmp_path / "file" / "kernels"):
        with pytest.raises(build.BuildError, match="QUAVER_KERNEL_CACHE"):
            build.find(ISA, cache)


def test_what_killed_compilations_left_is_removed(compiler: Script, cache: Path) -> None:
    compiler(MAKES)
    old, running = cache / "quaver-base-old", cache / "quaver-base-running"
    for folder in (old, running):
        folder.mkdir(parents=True)
        (folder / "model.o").touch()
    os.utime(old, (time.time() - 1e6,) * 2)
    made = build.library(ISA, cache)
    assert sorted(cache.iterdir()) == sorted([made, running])
