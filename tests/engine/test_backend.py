"""Which backend a model gets, whatever this machine has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.kernels.cpu import build
from engine.models import backend
from engine.settings import EngineSettings

NATIVE, REFERENCE, TRITON = "native", "reference", "triton"


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What `model_of` chooses; the models themselves are not built."""
    monkeypatch.setattr(backend, "_native", lambda *_: NATIVE)
    monkeypatch.setattr(backend, "_llama", lambda *_: REFERENCE)
    monkeypatch.setattr(backend, "_triton", lambda *_: TRITON)
    yield lambda **settings: backend.model_of(SimpleNamespace(), EngineSettings(**settings))


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    """A machine whose GPU has this compute capability; None: it has no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_auto_takes_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch, chosen: Any, dtype: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'quaver[gpu]'")
    gpu(monkeypatch, (9, 0))
    assert chosen(dtype=dtype) == chosen(backend="triton") == TRITON
    assert chosen(backend="cpu") == NATIVE
    assert chosen(backend="reference") == REFERENCE


def test_auto_without_a_gpu_asks_nothing_of_triton(monkeypatch: pytest.MonkeyPatch, chosen: Any) -> None:
    gpu(monkeypatch, None)
    monkeypatch.setattr(backend.kernels, "load", lambda _: pytest.fail("triton is not wanted"))
    assert chosen() == NATIVE
    assert chosen(dtype="float32") == REFERENCE


def test_auto_goes_on_without_what_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, chosen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_: Any) -> None:
        raise build.BuildError("no C++ compiler")

    gpu(monkeypatch, (9, 0))
    without_triton(monkeypatch)
    assert chosen() == NATIVE
    monkeypatch.setattr(backend, "_native", no_compiler)
    assert chosen() == REFERENCE
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [("GPU" in text, "compiler" in text) for text in warnings] == [
        *[(True, False)] * 2,
        (False, True),
    ]


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("engine.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("engine.kernels.triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)


def test_triton_by_name_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch, chosen: Any) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'quaver[gpu]'")
    for capability, words in (
        (None, "needs an NVIDIA GPU.*QUAVER_BACKEND=auto"),
        ((7, 5), r"8\.0.*has 7\.5"),
    ):
        gpu(monkeypatch, capability)
        with pytest.raises(RuntimeError, match=words):
            chosen(backend="triton")
    without_triton(monkeypatch)
    with pytest.raises(RuntimeError, match=r"pip install 'quaver\[gpu\]'"):
        chosen(backend="triton")


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("auto", "cuda", torch.bfloat16),
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_the_type_suits_the_device(dtype: Any, device: str, expected: torch.dtype) -> None:
    assert backend._dtype(EngineSettings(dtype=dtype), torch.device(device)) == expected
