"""`quaver doctor`: what is wrong with this installation, and the mend for it. Reads only.

Nothing here imports torch or numpy: the examination is over at once.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from dashboards.settings import DashboardSettings
from engine.kernels.cpu import build
from engine.models import store
from engine.settings import cores
from quaver.settings import Settings

Status = Literal["ok", "warning", "failed"]

_EXTRAS = {"dashboard": "streamlit", "load": "locust", "chaos": "chaoslib"}
_GIB = 1 << 30
_MIB = 1 << 20
#: Variables that are read elsewhere than in the settings: by the commands, Chaos Toolkit, Locust, our tests.
_OTHER_VARIABLES = {
    "QUAVER_DEBUG",
    "QUAVER_KEY",
    "QUAVER_TEST_CHROMIUM",
    *(f"QUAVER_{role}_KEY{file}" for role in ("CLIENT", "VIEWER", "OPERATOR") for file in ("", "_FILE")),
}
_OTHER_PREFIX = "QUAVER_LOAD_"
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One line of the examination. `mend` is empty where nothing needs mending."""

    status: Status
    subject: str
    text: str
    mend: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Look at everything `quaver serve` depends on. Never writes, never raises."""
    findings: list[Finding] = []
    for check in _CHECKS:
        try:
            findings.extend(check(settings))
        except Exception as error:
            findings.append(Finding("failed", check.__name__.strip("_"), f"{type(error).__name__}: {error}"))
    return findings


def _python(_settings: Settings) -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    yield Finding("ok", "python", version)


def _torch(_settings: Settings) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("failed", "torch", "not installed", "pip install torch")
        return
    if "+cpu" in version or _DRIVER.exists():
        yield Finding("ok", "torch", version)
    else:
        yield Finding(
            "ok", "torch", f"{version} (a CUDA build on a machine without an NVIDIA driver; it works)"
        )


def _model(settings: Settings) -> Iterator[Finding]:
    try:
        yield Finding(
            "ok", "model", f"{settings.model}: {store.resolve(settings.model, settings.model_cache)}"
        )
    except store.ModelNotFound as error:
        yield Finding("failed", "model", str(error), "run `quaver model pull`")


def _cpu(_settings: Settings) -> Iterator[Finding]:
    try:
        flags = set(
            Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("flags")[2].split("\n")[0].split()
        )
    except OSError:
        return
    useful = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if name in flags]
    count = cores()
    text = (
        f"{count} core{'s' if count > 1 else ''}; {', '.join(useful) or 'no vector extensions known to us'}"
    )
    if count < 2:
        yield Finding(
            "warning", "cpu", text, "give it two cores: the front process needs one beside the model"
        )
    else:
        yield Finding("ok", "cpu", text)


def _kernels(settings: Settings) -> Iterator[Finding]:
    if settings.backend == "reference":
        yield Finding("ok", "kernels", settings.backend)
        return
    lacking = _lacking_for_triton()
    if settings.backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        yield Finding("warning", "kernels", "triton, interpreted: for tests", "unset TRITON_INTERPRET")
        return
    if settings.backend == "triton" and lacking:
        yield Finding("failed", "kernels", f"triton cannot run: {lacking}", "set QUAVER_BACKEND=auto")
        return
    if settings.backend == "triton" or (settings.backend == "auto" and not lacking):
        yield Finding("ok", "kernels", "triton, on the GPU")
        return
    there = build.instruction_sets()
    isa = there[0] if settings.cpu_isa == "auto" else settings.cpu_isa
    if isa not in there:
        yield Finding(
            "failed", "kernels", f"this CPU has no {isa}", f"set QUAVER_CPU_ISA to one of {', '.join(there)}"
        )
        return
    try:
        compiled = build.find(isa, settings.kernel_cache)
    except build.BuildError as error:
        yield Finding(
            "warning", "kernels", f"reference, several times slower: {error}", "do what this says, once"
        )
        return
    text = isa if compiled else f"{isa}, compiled at the first start, which takes up to a minute longer"
    yield Finding("ok", "kernels", text)


def _lacking_for_triton() -> str:
    """What keeps Triton's kernels from this machine, as far as it shows without PyTorch; empty: nothing."""
    if not _DRIVER.exists():
        return "there is no NVIDIA driver"
    if "+cpu" in importlib.metadata.version("torch"):
        return "PyTorch is a build for CPUs"
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    return ""


def _disk(settings: Settings) -> Iterator[Finding]:
    for subject, folder in (("state", settings.state_dir), ("model cache", settings.model_cache)):
        path = folder.expanduser()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        free = shutil.disk_usage(existing).free / _GIB
        text = f"{path}: {free:.1f} GiB free"
        if not os.access(existing, os.W_OK):
            yield Finding("failed", subject, f"{existing} cannot be written", f"chown or chmod {existing}")
        elif free < 1:
            yield Finding("warning", subject, text, "free some space: records and models need about 1 GiB")
        else:
            yield Finding("ok", subject, text)


def _kv_disk(settings: Settings) -> Iterator[Finding]:
    """The folder of the disk tier: what would keep `engine.kv.disk_files.claim` from it, and its room."""
    if settings.kv_disk_dir is None:
        return
    folder = settings.kv_disk_dir.expanduser()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    kept = 0
    for file in folder.glob("*.kv") if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # the server deletes files at any time
            kept += file.stat().st_size
    wrong, mend = "", "name another folder in QUAVER_KV_DISK_DIR"
    if not existing.is_dir():
        wrong = f"{existing} is not a folder"
    elif usage.total == 0 or not os.access(existing, os.W_OK | os.X_OK):
        wrong = f"{existing} cannot be written"
    elif existing == folder and stat.S_IMODE(folder.stat().st_mode) & 0o077:
        wrong, mend = f"others may look into {folder}", f"chmod 700 {folder}"
    elif _is_locked(folder / ".lock"):
        wrong = f"{folder} is in use by a server"
        mend = "fine where that is this one; else " + mend
    elif usage.free + kept < settings.kv_disk_mb * _MIB:
        wrong = f"{folder}: {usage.free // _MIB} MiB free, QUAVER_KV_DISK_MB is {settings.kv_disk_mb}"
        mend = "free some space, or set QUAVER_KV_DISK_MB lower"
    if wrong:
        yield Finding("warning", "kv disk", f"{wrong}; without it prompts are computed again", mend)
    else:
        yield Finding("ok", "kv disk", f"{folder}: {usage.free / _GIB:.1f} GiB free")


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _pool(settings: Settings) -> Iterator[Finding]:
    if settings.kv_tokens < settings.max_context:
        yield Finding(
            "warning",
            "kv pool",
            f"no request longer than the pool's {settings.kv_tokens} tokens can run, though "
            f"QUAVER_MAX_CONTEXT is {settings.max_context}",
            f"set QUAVER_KV_TOKENS to {settings.max_context} or more, or QUAVER_MAX_CONTEXT lower",
        )


def _variables(_settings: Settings) -> Iterator[Finding]:
    """Variables that look like ours and that nobody reads."""
    fields = (*Settings.model_fields, *DashboardSettings.model_fields)
    known = {f"QUAVER_{name.upper()}" for name in fields} | _OTHER_VARIABLES
    for name in sorted(os.environ):
        own = name.upper()  # settings do not mind the case
        if own.startswith("QUAVER_") and own not in known and not own.startswith(_OTHER_PREFIX):
            close = difflib.get_close_matches(own, known, n=1, cutoff=0.8)
            mend = f"did you mean {close[0]}? " if close else ""
            yield Finding(
                "warning", "variables", f"nobody reads {name}", f"{mend}the README has the list of settings"
            )


def _port(settings: Settings) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            yield Finding(
                "warning",
                "port",
                f"{settings.host}:{settings.port}: {error.strerror}",
                "fine where that is Quaver itself; else end what uses it or set QUAVER_PORT",
            )
            return
    yield Finding("ok", "port", f"{settings.host}:{settings.port} is free")


def _keys(settings: Settings) -> Iterator[Finding]:
    folder = settings.keys_dir.expanduser()
    keys = sorted(folder.glob("*.key")) if folder.is_dir() else []
    if not keys:
        yield Finding("ok", "keys", f"none yet; `quaver serve` creates them in {folder}")
        return
    readable = [key for key in keys if stat.S_IMODE(key.stat().st_mode) & 0o077]
    for key in readable:
        yield Finding("failed", "keys", f"{key} can be read by others", f"chmod 600 {key}")
    if not readable:
        yield Finding("ok", "keys", f"{len(keys)} in {folder}, private")


def _extras(_settings: Settings) -> Iterator[Finding]:
    missing = [extra for extra, module in _EXTRAS.items() if importlib.util.find_spec(module) is None]
    if missing:
        yield Finding(
            "warning",
            "extras",
            f"not installed: {', '.join(missing)}",
            f"pip install 'quaver[{','.join(missing)}]' where you want them",
        )
    else:
        yield Finding("ok", "extras", ", ".join(_EXTRAS))


def _neighbours(settings: Settings) -> Iterator[Finding]:
    if settings.alertmanager_url is not None:
        yield _reachable("alertmanager", settings.alertmanager_url, "QUAVER_ALERTMANAGER_URL")
    if settings.otlp_endpoint is not None:
        yield _reachable("otlp", settings.otlp_endpoint, "QUAVER_OTLP_ENDPOINT")


def _reachable(subject: str, url: str, variable: str) -> Finding:
    parts = urlsplit(url if "//" in url else f"//{url}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=0.5).close()
    except OSError as error:
        return Finding("warning", subject, f"{url}: {error}", f"start it, or correct {variable}")
    return Finding("ok", subject, f"{url} answers")


_CHECKS: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
    _python,
    _torch,
    _model,
    _cpu,
    _kernels,
    _disk,
    _kv_disk,
    _pool,
    _variables,
    _port,
    _keys,
    _extras,
    _neighbours,
)
