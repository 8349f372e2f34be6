"""Recorded steps: keys, the bound, and that what comes out is what the plain step computes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.graphs import Graphs, Key, Recorder, Tensors, bucket

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


@given(sizes=calls, bound=st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_recorded_steps_equal_steps(
    tape: Callable[[], Any], sizes: list[tuple[int, int, int, str | None]], bound: int
) -> None:
    """Outputs and written pages are those of the plain step, whatever came before, within the bound."""
    step, plain = Step(), Step()
    plain.embedding = step.embedding
    recorder = tape()
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


def test_a_table_of_another_batch_is_refused(tape: Callable[[], Recorder]) -> None:
    graphs = Graphs(Step(), tape(), inputs=INPUTS, outputs=OUTPUTS)
    inputs = inputs_of(3, 2, 0) | {"tokens": torch.tensor([1, 2])}
    with pytest.raises(ValueError, match="slots has 3 along batch, others have 2"):
        graphs(inputs)


def test_no_room_is_refused(tape: Callable[[], Recorder]) -> None:
    with pytest.raises(ValueError, match="at least one recording"):
        Graphs(Step(), tape(), inputs=INPUTS, outputs=OUTPUTS, bound=0)


def test_a_failed_recording_is_not_kept(tape: Callable[[], Recorder]) -> None:
    def fails(inputs: Tensors, condition: object) -> Tensors:
        raise RuntimeError("no memory")

    graphs = Graphs(fails, tape(), inputs=INPUTS, outputs=OUTPUTS)
    with pytest.raises(RuntimeError, match="no memory"):
        graphs(inputs_of(2, 2, 0))
    assert len(graphs) == 0
