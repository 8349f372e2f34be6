"""The fused step against the plain one, on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.core import Engine
from engine.graphs import Recorder
from engine.kernels import fused, reference
from engine.kv.pages import PagePool
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.models.config import ModelConfig, weight_shapes
from engine.models.device import DeviceModel, work_of
from engine.models.fused import Fused, Step
from engine.models.llama import Llama
from engine.models.step import Batch, Detail, Output
from engine.models.weights import stored
from engine.settings import EngineSettings
from tests.engine.tiny import TINY

CONFIG = replace(TINY, layers=4)
PAGE = 4
PAGES = 9  # of each sequence
WATCHED = (1, 3)
CPU = torch.device("cpu")


#: Everything that near relatives of Llama add.
RELATIVE = replace(CONFIG, qkv_bias=True, qk_norm=True, sliding_window=11)


def random_model(dtype: torch.dtype, config: ModelConfig = CONFIG) -> Llama:
    source = torch.Generator().manual_seed(7)
    weights = {
        name: stored(1.0 * ("norm" in name) + 0.2 * torch.randn(shape, generator=source))
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
@pytest.mark.parametrize(
    "spans", [[(1, 7), (1, 0), (1, 30)], [(5, 0)], [(1, 9), (6, 3), (7, 0)], [(6, 3), (1, 9), (1, 0)]]
)
def test_fused_steps_equal_plain_steps(
    dtype: torch.dtype, tolerance: float, config: ModelConfig, spans: list[tuple[int, int]]
) -> None:
    """Distributions, lens and heads of every row, and what lies in the pages afterwards."""
    model, batch = random_model(dtype, config), batch_of(spans)
    plain, pages = pool_of(dtype), pool_of(dtype)
    output = model.step(batch, plain, [])
    step = Fused(model, fused, CPU, top=4).run(work_of(batch, CPU), pages.keys, pages.values)
    compare(step, output, tolerance)
    torch.testing.assert_close(pages.keys, plain.keys, atol=tolerance / 2, rtol=tolerance / 2)
    torch.testing.assert_close(pages.values, plain.values, atol=tolerance / 2, rtol=tolerance / 2)


@pytest.mark.parametrize("apart", [False, True])
def test_apart_the_head_is_given_the_wanted_rows_alone(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """So that what is watched cannot change the tiles that the wanted rows are computed in."""
    given: list[int] = []
    plain = fused.lm_head

    def counted(hidden: torch.Tensor, *rest: Any) -> fused.HeadRows:
        given.append(len(hidden))
        return plain(hidden, *rest)

    monkeypatch.setattr(fused, "lm_head", counted)
    model, batch, pages = random_model(torch.float32), batch_of([(1, 9), (6, 3)]), pool_of(torch.float32)
    output = model.step(batch, pool_of(torch.float32), [])
    step = Fused(model, fused, CPU, top=4, apart=apart).run(work_of(batch, CPU), pages.keys, pages.values)
    compare(step, output, 1e-3)
    assert given == ([2, 4] if apart else [6])


@pytest.mark.parametrize("layers", [(), WATCHED])
def test_recorded_decodes_equal_decodes(tape: Callable[[], Recorder], layers: tuple[int, ...]) -> None:
    """Every batch of a bucket through one recording, with and without detail."""
    model = Fused(random_model(torch.float32), fused, CPU, top=4)
    plain, pages = pool_of(torch.float32), pool_of(torch.float32)
    graphs = model.graphs(pages.keys, pages.values, tape())
    for starts in ([7, 0, 30, 12], [3, 33, 9], [0, 5, 21, 6], [34, 2, 2]):
        work = work_of(batch_of([(1, start) for start in starts]), CPU)
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
        step = model.run(work, plain.keys, plain.values)
        expected = step.rows._asdict() | {"hidden": step.hidden}
        del expected["chosen"]
        if layers:
            expected |= {"lens_entropy": step.lens_entropy, "heads": step.heads}
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(pages.keys, plain.keys, atol=1e-5, rtol=1e-5)
    assert len(graphs) == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_an_engine_on_a_device_model(tape: Callable[[], Recorder], recorded: bool) -> None:
    """Answers and signals of a whole engine, prompts and decodes mixed, greedy and drawn."""
    llama = random_model(torch.float32, RELATIVE)
    device = DeviceModel(Fused(llama, fused, CPU), "fused", tape() if recorded else None)
    found, expected = answers(device), answers(llama)
    assert found.keys() == expected.keys()
    for key, (tokens, signals) in found.items():
        assert tokens == expected[key][0]
        np.testing.assert_allclose(signals, expected[key][1], atol=2e-3, rtol=2e-3)
    assert device._graphs is None or 0 < len(device._graphs) <= 32
    assert (device._graphs is not None) == recorded


def answers(model: Any) -> dict[str, tuple[list[int], np.ndarray]]:
    settings = EngineSettings(kv_tokens=256, page_size=PAGE, max_running=3, step_tokens=8, signal_budget=1.0)
    engine = Engine(model, settings)
    for i in range(5):
        params = SamplingParams(max_tokens=7, temperature=0.8 if i == 3 else 0.0, seed=5, ignore_eos=True)
        prompt = [(7 * i + j) % CONFIG.vocab for j in range(3 * i + 1)]
        engine.submit(Submit(meta=RequestMeta(request_id=f"r{i}"), token_ids=prompt, params=params))
    tokens: dict[str, list[int]] = {}
    signals: dict[str, list[np.ndarray]] = {}
    while engine.has_work:
        output = engine.step()
        rows = np.frombuffer(output.signals, np.float32).reshape(len(output.request_ids), -1)
        for request, token, row in zip(
            output.request_ids, np.frombuffer(output.token_ids, np.int32).tolist(), rows, strict=True
        ):
            tokens.setdefault(request, []).append(token)
            signals.setdefault(request, []).append(row)
    engine.check()
    return {request: (tokens[request], np.array(signals[request])) for request in tokens}
