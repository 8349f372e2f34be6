"""The numerical operations of a model step, behind one set of names.

A backend is a module with the functions of `engine.kernels.reference`, which is the
specification: plain PyTorch, any device, no compilation. `triton` has those of
`engine.kernels.fused` too. They are imported when asked for: this package itself needs no PyTorch.
"""

from __future__ import annotations

from types import ModuleType

BACKENDS = ("reference", "triton")


def load(name: str) -> ModuleType:
    """Return the backend called `name`.

    Raises ValueError naming those there are, RuntimeError saying what is missing where it cannot run.
    """
    if name not in BACKENDS:
        raise ValueError(f"no kernel backend {name!r}; there are: {', '.join(BACKENDS)}")
    return _reference() if name == "reference" else _triton()


def _reference() -> ModuleType:
    from engine.kernels import reference  # noqa: PLC0415

    return reference


def _triton() -> ModuleType:
    try:
        from engine.kernels import triton  # noqa: PLC0415
    except ImportError as error:
        raise RuntimeError(
            "the triton backend needs the triton package: pip install 'quaver[gpu]'"
        ) from error
    triton.check()
    return triton
