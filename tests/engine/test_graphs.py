"""Graphs with a recorder that, like a CUDA graph, is fixed to addresses, shapes and the path taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine.graphs import Graphs, Key, Tensors, bucket


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

    def record(self, run: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        self.recorded += 1
        with _Tape() as tape:
            outputs = run()
        for tensor in outputs.values():
            tensor.fill_(-7)  # nothing counts before the first replay

        def replay() -> None:
            for func, args, kwargs, results in tape.operations:
                inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
                owned = {tensor.untyped_storage().data_ptr() for tensor in inputs}
                again = [leaf for leaf in tree_flatten(func(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
                for old, new in zip(results, again, strict=True):
                    if old.untyped_storage().data_ptr() not in owned:  # a view shows its input by itself
                        old.copy_(new)

        return replay, outputs


INPUTS = {"tokens": ("batch",), "slots": ("batch",), "table": ("batch", "pages"), "places": ("detail",)}
OUTPUTS = {"sums": ("batch",), "wide": ("batch",), "picked": ("detail",)}


class Step:
    """A step in small: embeds, writes to its pages, reads them through the table, picks rows for detail."""

    def __init__(self) -> None:
        self.embedding = torch.randn(50, 4)
        self.pages = torch.zeros(40, 4)

    def __call__(self, inputs: Tensors, condition: object) -> Tensors:
        x = self.embedding[inputs["tokens"]]
        self.pages.index_copy_(0, inputs["slots"], x)
        found = {"sums": self.pages[inputs["table"]].amax((1, 2)), "wide": x * 2}
        if condition == "negated":
            found["wide"] = -found["wide"]
        if len(inputs["places"]):
            found["picked"] = found["wide"][inputs["places"]].sum(1)
        return found


def inputs_of(batch: int, pages: int, detail: int) -> Tensors:
    slots = torch.randperm(40)[:batch]
    others = torch.randint(40, (batch, pages))
    others[:, 0] = slots
    return {
        "tokens": torch.randint(50, (batch,)),
        "slots": slots,
        "table": others,
        "places": torch.randint(batch, (detail,)),
    }


calls = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 3), st.sampled_from([None, "negated"])),
    min_size=1,
    max_size=14,
)


@given(calls, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_recorded_steps_equal_steps(sizes: list[tuple[int, int, int, str | None]], bound: int) -> None:
    """Outputs and written pages are those of the plain step, whatever came before, within the bound."""
    step, plain = Step(), Step()
    plain.embedding = step.embedding
    recorder = TapeRecorder()
    graphs = Graphs(step, recorder, inputs=INPUTS, outputs=OUTPUTS, bound=bound)
    known: OrderedDict[Key, None] = OrderedDict()
    returned: list[tuple[Tensors, Tensors]] = []
    for batch, pages, detail, condition in sizes:
        inputs = inputs_of(batch, pages, detail)
        given_copies = {name: tensor.clone() for name, tensor in inputs.items()}
        key = graphs.key(inputs, condition)
        recorded = recorder.recorded
        found = graphs(inputs, condition)
        assert recorder.recorded - recorded == (key not in known)
        known[key] = None
        known.move_to_end(key)
        if len(known) > bound:
            known.popitem(last=False)
        assert len(graphs) == len(known)
        assert all(kept in graphs for kept in known)
        expected = plain(inputs, condition)
        returned.append((found, expected))
        assert torch.equal(step.pages, plain.pages), "padded rows must not write elsewhere"
        assert all(torch.equal(inputs[name], given_copies[name]) for name in inputs)
    for found, expected in returned:  # later replays leave earlier results alone
        assert found.keys() == expected.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_buckets(size: int, other: int) -> None:
    assert size <= bucket(size) <= max(size, size * 3 // 2)
    assert bucket(bucket(size)) == bucket(size)
    assert bucket(size) <= bucket(other) or size > other
    assert (bucket(size) == 0) == (size == 0)


def test_there_are_few_buckets() -> None:
    assert sorted({bucket(size) for size in range(1, 65)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def test_a_table_of_another_batch_is_refused() -> None:
    graphs = Graphs(Step(), TapeRecorder(), inputs=INPUTS, outputs=OUTPUTS)
    inputs = inputs_of(3, 2, 0) | {"tokens": torch.tensor([1, 2])}
    with pytest.raises(ValueError, match="slots has 3 along batch, others have 2"):
        graphs(inputs)


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one recording"):
        Graphs(Step(), TapeRecorder(), inputs=INPUTS, outputs=OUTPUTS, bound=0)


def test_a_failed_recording_is_not_kept() -> None:
    def fails(inputs: Tensors, condition: object) -> Tensors:
        raise RuntimeError("no memory")

    graphs = Graphs(fails, TapeRecorder(), inputs=INPUTS, outputs=OUTPUTS)
    with pytest.raises(RuntimeError, match="no memory"):
        graphs(inputs_of(2, 2, 0))
    assert len(graphs) == 0
