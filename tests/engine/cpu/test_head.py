"""The LM head in one pass over the vocabulary, statistics of logits, and draws, against plain PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine.kernels import reference

F32 = 0
TOP = 32
RANK = 3
ROW = np.dtype(
    [("lse", np.float32), ("entropy", np.float32), ("ids", np.int32, TOP), ("values", np.float32, TOP)]
)

many = settings(max_examples=40, deadline=None)


def pointer(array: np.ndarray) -> ctypes.Array[ctypes.c_char]:
    """The array's own memory, which lives as long as the pointer does."""
    assert array.flags.c_contiguous
    return (ctypes.c_char * array.nbytes).from_buffer(array)


@dataclass
class Head:
    """A random head [vocabulary, cols] in 8 bits and inputs that one pass reads."""

    native: ctypes.CDLL
    vocabulary: int
    cols: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        weights = rng.standard_normal((self.vocabulary, self.cols), dtype=np.float32)
        self.native.quaver_matrix.restype = ctypes.c_void_p
        self.matrix = ctypes.c_void_p(self.native.quaver_matrix(self.vocabulary, self.cols, 8))
        self.native.quaver_pack_rows(self.matrix, 0, self.vocabulary, F32, pointer(weights))

    def inputs(self, rows: int, size: float = 0.4) -> np.ndarray:
        rng = np.random.default_rng(self.seed + 1)
        return np.asarray(size * rng.standard_normal((rows, self.cols)), np.float32)

    def __call__(
        self, x: np.ndarray, top_rows: int, threads: int = 1, keep: Sequence[bool] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows' statistics and the logits of the rows to keep (NaN elsewhere)."""
        wanted = [True] * top_rows if keep is None else keep
        out = np.zeros(len(x), ROW)
        logits = np.full((len(x), self.vocabulary), np.nan, np.float32)
        rows = (ctypes.c_void_p * max(top_rows, 1))()
        for row, want in enumerate(wanted):
            rows[row] = logits[row].ctypes.data if want else None
        self.native.quaver_head_pass(
            self.matrix, pointer(x), len(x), top_rows, threads, 1, rows, pointer(out)
        )
        return out, logits


def entropy64(logits: np.ndarray) -> np.ndarray:
    p = torch.from_numpy(logits).double().softmax(-1)
    return torch.special.entr(p).sum(-1).numpy()


def largest(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The TOP largest of one row, ties by the smaller id."""
    ids = np.argsort(-logits, kind="stable")[:TOP]
    return ids, logits[ids]


@pytest.mark.parametrize(
    ("vocabulary", "rows"), [(5, 1), (16, 3), (31, 2), (259, 17), (1000, 40), (49_152, 3)]
)
def test_one_pass_gives_what_the_whole_logits_give(native: ctypes.CDLL, vocabulary: int, rows: int) -> None:
    head = Head(native, vocabulary)
    out, logits = head(head.inputs(rows), top_rows=rows)
    lse = torch.from_numpy(logits).double().logsumexp(-1)
    assert np.abs(out["lse"] - lse.numpy()).max() < 1e-5
    assert np.abs(out["entropy"] - entropy64(logits)).max() < 1e-5
    for row in range(rows):
        ids, values = largest(logits[row])
        assert out["ids"][row, : len(ids)].tolist() == ids.tolist()
        assert out["values"][row, : len(ids)].tolist() == values.tolist()
        assert (out["ids"][row, len(ids) :] == -1).all()
        assert (out["values"][row, len(ids) :] == -np.inf).all()


def test_the_logits_are_the_products_of_the_head(native: ctypes.CDLL) -> None:
    head = Head(native, 300)
    weights = np.random.default_rng(0).standard_normal((300, 64), dtype=np.float32)
    x = head.inputs(4)
    _, logits = head(x, top_rows=4)
    assert np.abs(logits - x @ weights.T).max() < 0.15  # both sides are rounded to 8 bits


@many
@given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(2, 900),
    size=st.floats(0, 30),
    data=st.data(),
)
def test_no_row_depends_on_its_batch_or_on_the_threads(
    native: ctypes.CDLL, rows: int, vocabulary: int, size: float, data: st.DataObject
) -> None:
    top_rows = data.draw(st.integers(0, rows))
    head = Head(native, vocabulary, seed=rows)
    x = head.inputs(rows, size)
    one, logits = head(x, top_rows)
    two, same = head(x, top_rows, threads=2)
    assert one.tobytes() == two.tobytes()
    assert logits.tobytes() == same.tobytes()
    row = data.draw(st.integers(0, rows - 1))
    alone, _ = head(x[row : row + 1].copy(), int(row < top_rows))
    assert alone.tobytes() == one[row : row + 1].tobytes()
    assert np.abs(one["entropy"][:top_rows] - entropy64(logits[:top_rows])).max(initial=0) < 1e-4


def test_only_rows_to_keep_are_written(native: ctypes.CDLL) -> None:
    head = Head(native, 400)
    x = head.inputs(5)
    everything, all_logits = head(x, top_rows=3)
    out, logits = head(x, top_rows=3, keep=[False, True, False])
    assert out.tobytes() == everything.tobytes()
    assert np.isnan(logits[[0, 2, 3, 4]]).all()
    assert logits[1].tolist() == all_logits[1].tolist()
    assert (out["ids"][3:] == 0).all()  # lens rows have none; the zeros are the test's


def test_equal_logits_stand_in_the_order_of_their_ids(native: ctypes.CDLL) -> None:
    head = Head(native, 1000)
    for threads in (1, 2):
        out, _ = head(np.zeros((2, 64), np.float32), top_rows=2, threads=threads)
        assert out["ids"].tolist() == [list(range(TOP))] * 2
        assert np.abs(out["entropy"] - np.log(1000)).max() < 1e-6


def statistics(native: ctypes.CDLL, logits: np.ndarray, *tokens: int) -> np.ndarray:
    """One row for each token, all of the same logits."""
    rows = np.repeat(logits[None], len(tokens), 0)
    out = np.empty((len(tokens), 5), np.float32)
    native.quaver_token_statistics(
        pointer(rows), len(tokens), len(logits), pointer(np.array(tokens, np.int32)), pointer(out)
    )
    return out


LOGITS = arrays.arrays(
    np.float32,
    st.integers(2, 700),
    elements=st.one_of(st.floats(-40, 40, width=32), st.sampled_from([0.0, 1.0, 8.0, -np.inf])),
).filter(lambda logits: np.isfinite(logits).any())


@many
@given(logits=LOGITS, data=st.data())
def test_token_statistics(native: ctypes.CDLL, logits: np.ndarray, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    got = statistics(native, logits, token)[0]
    wanted = reference.token_statistics(torch.from_numpy(logits)[None].double(), torch.tensor([token]))[0]
    wanted[RANK] = (logits > logits[token]).sum() + 1  # the reference ties what is equal after a shift
    np.testing.assert_allclose(got, wanted.numpy(), rtol=2e-6, atol=2e-6)


def test_token_statistics_of_a_whole_vocabulary(native: ctypes.CDLL) -> None:
    logits = np.random.default_rng(3).normal(0, 3, 49_152).astype(np.float32)
    logits[100:200] = -np.inf
    tokens = (0, 150, int(logits.argmax()))
    wanted = reference.token_statistics(torch.from_numpy(logits).double().repeat(3, 1), torch.tensor(tokens))
    np.testing.assert_allclose(statistics(native, logits, *tokens), wanted.numpy(), rtol=2e-6)


def draws(
    native: ctypes.CDLL, logits: np.ndarray, temperature: float, top_k: int, top_p: float, *points: float
) -> list[int]:
    """One token for each point, all of the same logits."""
    count = len(points)
    out = np.empty(count, np.int32)
    native.quaver_sample(
        pointer(np.repeat(logits[None], count, 0)),
        count,
        len(logits),
        pointer(np.full(count, temperature, np.float32)),
        pointer(np.full(count, top_k, np.int32)),
        pointer(np.full(count, top_p, np.float32)),
        pointer(np.array(points, np.float64)),
        pointer(out),
    )
    return out.tolist()


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> tuple[np.ndarray, bool]:
    """What may be drawn, as float64 weights, and whether the last place of the nucleus is beyond doubt."""
    z = logits.astype(np.float64) / np.float32(temperature)
    weights = np.exp(z - z.max())
    if 0 < top_k < len(z):
        weights[z < np.sort(z)[-top_k]] = 0
    if np.float32(top_p) == 1:
        return weights, True
    order = np.argsort(-weights, kind="stable")
    share = weights[order] / weights.sum()
    before = share.cumsum() - share
    steps = share[:-1] - share[1:]  # those that float32 cannot tell apart may change places
    weights[order[before >= np.float32(top_p)]] = 0
    told_apart = not ((steps > 0) & (steps < 1e-6)).any()
    return weights, told_apart and bool(np.abs(before[1:] - np.float32(top_p)).min() > 1e-5)


@settings(max_examples=150, deadline=None)
@given(
    logits=LOGITS,
    temperature=st.floats(0.05, 3),
    top_k=st.one_of(st.just(0), st.integers(1, 800)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    point=st.floats(0, 1, exclude_max=True),
)
@example(logits=np.zeros(600, np.float32), temperature=1, top_k=0, top_p=0.5004, point=0.9999)
@example(logits=np.zeros(600, np.float32), temperature=1, top_k=7, top_p=1, point=0.9999)
@example(logits=np.array([-np.inf, 1, 2], np.float32), temperature=1, top_k=0, top_p=1, point=0)
@example(logits=np.array([0, 1e-15], np.float32), temperature=1, top_k=0, top_p=0.25, point=0)
def test_draws(
    native: ctypes.CDLL, *, logits: np.ndarray, temperature: float, top_k: int, top_p: float, point: float
) -> None:
    weights, certain = kept(logits, temperature, top_k, top_p)
    [token] = draws(native, logits, temperature, top_k, top_p, point)
    assert logits[token] > -np.inf
    if not certain:
        return
    cumulative = weights.cumsum() / weights.sum()
    assert weights[token] > 0
    before = cumulative[token - 1] if token else 0
    assert before - 2e-6 <= point <= cumulative[token] + 2e-6


@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_logits_that_say_nothing_still_give_a_token(native: ctypes.CDLL, value: float) -> None:
    logits = np.full(300, value, np.float32)
    for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.9)):
        [token] = draws(native, logits, 0.7, top_k, top_p, 0.5)
        assert 0 <= token < 300


def test_inputs_that_are_not_numbers_give_no_numbers(native: ctypes.CDLL) -> None:
    head = Head(native, 300)
    x = head.inputs(2)
    x[1] = np.nan
    out, _ = head(x, top_rows=2)
    assert np.isfinite(out["entropy"][0])
    assert ((out["ids"] >= 0) & (out["ids"] < 300)).all()


@pytest.mark.parametrize("size", [0.01, 1.0, 3.0, 10.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (1, 1.0), (50, 1.0), (40_000, 1.0), (0, 0.9), (0, 0.999), (50, 0.9)]
)
def test_draws_from_a_whole_vocabulary(native: ctypes.CDLL, size: float, top_k: int, top_p: float) -> None:
    rng = np.random.default_rng(5)
    logits = (size * rng.standard_normal(49_152)).astype(np.float32)
    weights, _ = kept(logits, 0.7, top_k, top_p)
    cumulative = weights.cumsum() / weights.sum()
    points = rng.random(50)
    for point, token in zip(points, draws(native, logits, 0.7, top_k, top_p, *points), strict=True):
        before = cumulative[token - 1] if token else 0
        assert before - 2e-5 <= point <= cumulative[token] + 2e-5


def test_no_temperature_takes_the_first_of_the_largest(native: ctypes.CDLL) -> None:
    logits = np.array([0, 3, -1, 3], np.float32)
    assert draws(native, logits, 0, 2, 0.5, 0.9, 0.1) == [1, 1]
