"""The fused step against the plain one, on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.graphs import Recorder
from engine.kernels import fused, reference
from engine.kv.pages import PagePool
from engine.models.config import ModelConfig, weight_shapes
from engine.models.fused import Chunk, Fused, Step, Watch, Work
from engine.models.llama import Llama
from engine.models.step import Batch, Detail, Output
from engine.models.weights import stored

CONFIG = ModelConfig(
    name="random",
    architecture="llama",
    vocab=61,
    hidden=32,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=48,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    max_context=64,
    tied_embeddings=False,
    quantization="none",
    bos_id=None,
    eos_ids=(0,),
    add_bos=False,
)
PAGE = 4
PAGES = 9  # of each sequence
WATCHED = (1, 3)


#: Everything that near relatives of Llama add.
RELATIVE = replace(CONFIG, qkv_bias=True, qk_norm=True, sliding_window=11)


def random_model(dtype: torch.dtype, config: ModelConfig = CONFIG) -> Llama:
    source = torch.Generator().manual_seed(7)
    weights = {
        name: stored(
            torch.rand(shape) + 0.5 if "norm" in name else 0.3 * torch.randn(shape, generator=source)
        )
        for name, shape in weight_shapes(config).items()
    }
    return Llama(config, weights, dtype, reference)


def pool_of(dtype: torch.dtype) -> PagePool:
    pool = PagePool(
        layers=CONFIG.layers, pages=4 * PAGES, page_size=PAGE, kv_heads=2, head_dim=8, dtype=dtype
    )
    for pages in (pool.keys, pool.values):
        pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(3)))
    return pool


def batch_of(spans: list[tuple[int, int]]) -> Batch:
    """A batch of (count, start) spans, a sequence each, all of them watched."""
    counts, starts = np.array(spans, np.int32).T
    ends = np.cumsum(counts, dtype=np.int32)
    tables = np.arange(len(spans) * PAGES, dtype=np.int32).reshape(-1, PAGES)
    positions = np.concatenate([np.arange(start, start + count) for count, start in spans])
    rows = np.repeat(np.arange(len(spans)), counts)
    return Batch(
        tokens=np.arange(ends[-1], dtype=np.int32) % CONFIG.vocab,
        slots=tables[rows, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE,
        offsets=ends - counts,
        counts=counts,
        starts=starts,
        tables=tables,
        rows=ends - 1,
        detail=Detail(
            layers=np.array(WATCHED, np.int32),
            spans=np.arange(len(spans), dtype=np.int32),
            prompt_lengths=np.maximum((starts + counts) // 2, 1).astype(np.int32),
        ),
    )


def work_of(batch: Batch) -> Work:
    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).long()

    offsets, counts, starts, tables = map(tensor, (batch.offsets, batch.counts, batch.starts, batch.tables))
    assert batch.detail is not None
    decodes = int((counts == 1).sum())
    ends = starts + counts
    return Work(
        tokens=tensor(batch.tokens),
        positions=torch.cat([torch.arange(s, e) for s, e in zip(starts, ends, strict=True)]),
        slots=tensor(batch.slots),
        table=tables[:decodes],
        lengths=ends[:decodes],
        rows=tensor(batch.rows),
        prefills=[
            Chunk(int(offsets[i]), int(counts[i]), int(starts[i]), tables[i : i + 1])
            for i in range(decodes, len(counts))
        ],
        watch=Watch(WATCHED, tensor(batch.rows), tables, ends, tensor(batch.detail.prompt_lengths)),
    )


def compare(step: Step, output: Output, tolerance: float) -> None:
    top = step.rows.top_logits.shape[1]
    expected = {
        "lse": torch.from_numpy(output.lse),
        "entropy": torch.from_numpy(output.entropy),
        "top_logits": torch.from_numpy(output.values[:, :top]),
    }
    for name, values in expected.items():
        torch.testing.assert_close(getattr(step.rows, name), values, atol=tolerance, rtol=tolerance)
    assert output.detail is not None
    for found, wanted in (
        (step.lens_entropy, output.detail.lens_entropy),
        (step.heads, output.detail.heads),
    ):
        torch.testing.assert_close(
            found, torch.from_numpy(wanted), atol=tolerance, rtol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.25)])
@pytest.mark.parametrize("config", [CONFIG, RELATIVE])
@pytest.mark.parametrize("spans", [[(1, 7), (1, 0), (1, 30)], [(5, 0)], [(1, 9), (6, 3), (7, 0)]])
def test_fused_steps_equal_plain_steps(
    dtype: torch.dtype, tolerance: float, config: ModelConfig, spans: list[tuple[int, int]]
) -> None:
    """Distributions, lens and heads of every row, and what lies in the pages afterwards."""
    model, batch = random_model(dtype, config), batch_of(spans)
    plain, pages = pool_of(dtype), pool_of(dtype)
    output = model.step(batch, plain, [])
    step = Fused(model, fused, torch.device("cpu"), top=4).step(work_of(batch), pages.keys, pages.values)
    compare(step, output, tolerance)
    torch.testing.assert_close(pages.keys, plain.keys, atol=tolerance / 2, rtol=tolerance / 2)
    torch.testing.assert_close(pages.values, plain.values, atol=tolerance / 2, rtol=tolerance / 2)


@pytest.mark.parametrize("layers", [(), WATCHED])
def test_recorded_decodes_equal_decodes(tape: Callable[[], Recorder], layers: tuple[int, ...]) -> None:
    """Every batch of a bucket through one recording, with and without detail."""
    model = Fused(random_model(torch.float32), fused, torch.device("cpu"), top=4)
    plain, pages = pool_of(torch.float32), pool_of(torch.float32)
    graphs = model.graphs(pages.keys, pages.values, tape())
    for starts in ([7, 0, 30, 12], [3, 33, 9], [0, 5, 21, 6], [34, 2, 2]):
        work = work_of(batch_of([(1, start) for start in starts]))
        assert work.watch is not None
        places = work.watch.places if layers else work.watch.places[:0]
        found = graphs(
            {
                "tokens": work.tokens,
                "positions": work.positions,
                "slots": work.slots,
                "table": work.table,
                "lengths": work.lengths,
                "places": places,
                "prompt_lengths": work.watch.prompt_lengths[: len(places)],
            },
            layers,
        )
        step = model.step(work, plain.keys, plain.values)
        expected = step.rows._asdict()
        del expected["chosen"]
        if layers:
            expected |= {"lens_entropy": step.lens_entropy, "heads": step.heads}
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(pages.keys, plain.keys, atol=1e-5, rtol=1e-5)
    assert len(graphs) == 2
