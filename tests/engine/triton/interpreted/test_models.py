"""Whole models on the kernels."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from engine.kernels import fused, reference, triton
from engine.kv.pages import PagePool
from engine.models.config import weight_shapes
from engine.models.fused import Chunk, Fused, Watch, Work
from engine.models.llama import Llama
from engine.models.step import Batch, Detail
from engine.models.weights import stored
from tests.engine.tiny import TINY

CONFIG = replace(TINY, tied_embeddings=True)
PAGE = 4


def model(ops: ModuleType) -> Llama:
    source = torch.Generator().manual_seed(7)
    weights = {
        name: stored(torch.ones(shape) if "norm" in name else 0.3 * torch.randn(shape, generator=source))
        for name, shape in weight_shapes(CONFIG).items()
    }
    return Llama(CONFIG, weights, torch.float32, ops)


def pool() -> PagePool:
    made = PagePool(layers=2, pages=12, page_size=PAGE, kv_heads=2, head_dim=8, dtype=torch.float32)
    for pages in (made.keys, made.values):
        pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(3)))
    return made


@pytest.mark.parametrize("backend", [reference, fused])
def test_it_has_every_function(backend: ModuleType) -> None:
    public = inspect.getmembers(backend, lambda value: inspect.isfunction(value) and value.__name__[0] != "_")
    wanted = {name for name, function in public if function.__module__.startswith("engine.")}
    assert len(wanted) > 8
    assert wanted - set(triton.__all__) == set()


def test_llama_on_the_kernels() -> None:
    """A decode at 9 and a prompt of 6 tokens, detail of both."""
    tables = np.arange(6, dtype=np.int32).reshape(2, 3)
    batch = Batch(
        tokens=np.arange(7, dtype=np.int32),
        slots=np.array([9, *range(12, 18)], np.int64),
        offsets=np.array([0, 1], np.int32),
        counts=np.array([1, 6], np.int32),
        starts=np.array([9, 0], np.int32),
        tables=tables,
        rows=np.array([0, 6], np.int32),
        detail=Detail(np.array([0, 1], np.int32), np.array([0, 1], np.int32), np.array([4, 6], np.int32)),
    )
    pages, plain_pages = pool(), pool()
    found, expected = model(triton).step(batch, pages, [0]), model(reference).step(batch, plain_pages, [0])
    np.testing.assert_allclose(found.values, expected.values, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(found.entropy, expected.entropy, atol=1e-4, rtol=1e-4)
    assert found.detail is not None
    assert expected.detail is not None
    np.testing.assert_allclose(found.detail.heads, expected.detail.heads, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(pages.keys, plain_pages.keys, atol=1e-5, rtol=1e-5)

    work = Work(
        tokens=torch.arange(7),
        positions=torch.tensor([9, *range(6)]),
        slots=torch.from_numpy(batch.slots),
        table=torch.from_numpy(tables[:1]),
        lengths=torch.tensor([10]),
        rows=torch.tensor([0, 6]),
        prefills=[Chunk(1, 6, 0, torch.from_numpy(tables[1:]))],
        watch=Watch(
            (0, 1),
            torch.tensor([0, 6]),
            torch.from_numpy(tables),
            torch.tensor([10, 6]),
            torch.tensor([4, 6]),
        ),
    )
    fused_pages = pool()
    step = Fused(model(reference), triton, torch.device("cpu"), top=3).run(
        work, fused_pages.keys, fused_pages.values
    )
    np.testing.assert_allclose(step.rows.top_logits, expected.values[:, :3], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(step.rows.entropy, expected.entropy, atol=1e-4, rtol=1e-4)
    assert step.heads is not None
    assert step.lens_entropy is not None
    np.testing.assert_allclose(step.heads, expected.detail.heads, atol=1e-4, rtol=1e-3)
    np.testing.assert_allclose(step.lens_entropy, expected.detail.lens_entropy, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused_pages.values, plain_pages.values, atol=1e-5, rtol=1e-5)
