"""The numerical operations of a model step, behind one set of names.

A backend is a module with the functions of `engine.kernels.reference`, which is the
specification: plain PyTorch, any device, no compilation.
"""

from __future__ import annotations

from types import ModuleType

from engine.kernels import reference

BACKENDS: dict[str, ModuleType] = {"reference": reference}


def load(name: str) -> ModuleType:
    """Return the backend called `name`; raises ValueError naming those there are."""
    if name not in BACKENDS:
        raise ValueError(f"no kernel backend {name!r}; there are: {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]
