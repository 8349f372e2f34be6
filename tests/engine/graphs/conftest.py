"""A recorder that, like a CUDA graph, is fixed to addresses, shapes and the path taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine.graphs import Tensors


class _Tape(TorchDispatchMode):
    """Notes every operation on tensors with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        self.operations.append((func, args, kwargs or {}, results))
        return result


class TapeRecorder:
    """Records operations and replays them on the very tensors of the recording."""

    def __init__(self) -> None:
        self.recorded = 0

    @torch.inference_mode()
    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        self.recorded += 1
        with _Tape() as tape:
            outputs = run()
        for tensor in outputs.values():
            tensor.fill_(-7)  # nothing counts before the first replay

        @torch.inference_mode()
        def replay() -> None:
            for func, args, kwargs, results in tape.operations:
                inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
                owned = {tensor.untyped_storage().data_ptr() for tensor in inputs}
                again = [leaf for leaf in tree_flatten(func(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
                for old, new in zip(results, again, strict=True):
                    if old.untyped_storage().data_ptr() not in owned:  # a view shows its input by itself
                        old.copy_(new)

        return replay, outputs


@pytest.fixture(scope="session")
def tape() -> type[TapeRecorder]:
    return TapeRecorder
