"""The doctor: reads only, quick, names the mend, its exit status says whether to serve."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine.kv.disk_files import claim
from quaver.cli import app
from quaver.doctor import Finding, examine
from quaver.settings import Settings


def by_subject(settings: Settings) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(settings)}


def test_nothing_is_written_and_a_missing_model_is_mended(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path / "state", model_cache=tmp_path / "models")
    found = by_subject(settings)
    assert found["model"].status == "failed"
    assert "quaver model pull" in found["model"].mend
    assert found["keys"].status == "ok"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("count", "words"), [(0, "0 warnings"), (1, "1 warning,"), (2, "2 warnings")])
def test_the_sum_is_grammatical(count: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [Finding("warning", "x", "y")] * count
    monkeypatch.setattr("quaver.doctor.examine", lambda settings: findings)
    assert words in CliRunner().invoke(app, ["doctor"]).output


def test_readable_keys_fail(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    key = tmp_path / "keys" / "operator.key"
    key.write_text("qv-operator-0000000000000000")
    key.chmod(0o644)
    finding = by_subject(Settings(state_dir=tmp_path))["keys"]
    assert finding.status == "failed"
    assert finding.mend == f"chmod 600 {key}"
    key.chmod(0o600)
    assert by_subject(Settings(state_dir=tmp_path))["keys"].status == "ok"


def test_a_port_in_use_and_an_absent_alertmanager_are_warnings(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = by_subject(
            Settings(state_dir=tmp_path, port=port, alertmanager_url="http://127.0.0.1:9", otlp_endpoint=None)
        )
    assert found["port"].status == "warning"
    assert found["alertmanager"].status == "warning"
    assert found["alertmanager"].mend


def test_a_folder_of_the_disk_tier_that_cannot_serve_is_told(tmp_path: Path) -> None:
    def told(folder: Path, **more: Any) -> Finding:
        return by_subject(Settings(state_dir=tmp_path, kv_disk_dir=folder, **more))["kv disk"]

    file = tmp_path / "file"
    file.touch()
    assert "is not a folder" in told(file).text
    assert "cannot be written" in told(Path("/proc/nope")).text
    assert told(tmp_path / "new" / "folder", kv_disk_mb=1).status == "ok"
    assert not (tmp_path / "new").exists()
    assert "QUAVER_KV_DISK_MB" in told(tmp_path / "new", kv_disk_mb=1 << 40).mend
    folder = tmp_path / "kv"
    lock = claim(folder)
    taken = told(folder, kv_disk_mb=1)
    os.close(lock)
    assert (taken.status, "in use by a server" in taken.text) == ("warning", True)
    assert told(folder, kv_disk_mb=1).status == "ok"
    folder.chmod(0o755)
    assert told(folder, kv_disk_mb=1).mend == f"chmod 700 {folder}"


def test_a_pool_smaller_than_the_context_is_told(tmp_path: Path) -> None:
    assert "512 tokens" in by_subject(Settings(state_dir=tmp_path, kv_tokens=512))["kv pool"].text
    assert "kv pool" not in by_subject(Settings(state_dir=tmp_path, kv_tokens=512, max_context=512))


def test_variables_that_nobody_reads_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUAVER_KV_HOST_MB", "QUAVER_URL", "QUAVER_VIEWER_KEY", "QUAVER_LOAD_RATE"):
        monkeypatch.setenv(name, "1")
    assert "variables" not in by_subject(Settings(state_dir=tmp_path))
    monkeypatch.setenv("QUAVER_KV_DISC_DIR", "/tmp")
    finding = by_subject(Settings(state_dir=tmp_path))["variables"]
    assert finding.status == "warning"
    assert "QUAVER_KV_DISK_DIR" in finding.mend


@pytest.mark.parametrize(
    ("backend", "driver", "torch", "interpreted", "expected"),
    [
        ("triton", False, "2.13.0", "", ("failed", "no NVIDIA driver")),
        ("triton", True, "2.13.0+cpu", "", ("failed", "build for CPUs")),
        ("triton", False, "2.13.0", "1", ("warning", "interpreted")),
        ("triton", True, "2.13.0", "", ("ok", "triton, on the GPU")),
        ("auto", True, "2.13.0", "", ("ok", "triton, on the GPU")),
        ("reference", True, "2.13.0", "", ("ok", "reference")),
    ],
)
def test_kernels_of_a_gpu(
    *,
    backend: Any,
    driver: bool,
    torch: str,
    interpreted: str,
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("quaver.doctor._DRIVER", Path("/") if driver else tmp_path / "none")
    monkeypatch.setattr("importlib.metadata.version", lambda _: torch)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: "found")
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    finding = by_subject(Settings(state_dir=tmp_path, backend=backend))["kernels"]
    assert finding.status == expected[0]
    assert expected[1] in finding.text


def test_a_damaged_model_fails(tmp_path: Path) -> None:
    damaged = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    damaged.write_bytes(b"GGUF")
    finding = by_subject(Settings(state_dir=tmp_path, model_cache=tmp_path))["model"]
    assert finding.status == "failed"
    assert "damaged" in finding.text


@pytest.mark.model
def test_command_says_ok_and_imports_nothing_slow() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "quaver", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.splitlines()[-1].endswith("0 failed")
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "quaver.doctor" in imported
    assert not imported & {"torch", "scipy", "numpy", "gguf", "tokenizers", "streamlit", "locust"}


def test_it_needs_no_pytorch() -> None:
    code = "import sys, quaver.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
