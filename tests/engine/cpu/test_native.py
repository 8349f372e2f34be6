"""Whole steps on the native kernels against the reference, on the weights that they hold."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from engine import kernels
from engine.core import Engine
from engine.kernels.cpu import build
from engine.kernels.cpu.library import open_library
from engine.kernels.reference import entropy
from engine.kv.pages import PagePool
from engine.messages import RequestMeta, SamplingParams, Submit
from engine.models.config import ModelConfig, weight_shapes
from engine.models.llama import Llama
from engine.models.loader import load
from engine.models.native import NativeLlama
from engine.models.step import Batch, Detail, Model, Output, with_rows
from engine.models.weights import StoredWeight, stored
from engine.settings import EngineSettings
from tests.engine.tiny import TINY

PAGE = 8
CONFIG = replace(
    TINY,
    vocab=263,
    hidden=64,
    layers=3,
    head_dim=32,
    intermediate=96,
    max_context=512,
    tied_embeddings=True,
)
FAMILIES = {
    "llama": CONFIG,
    "untied": replace(CONFIG, tied_embeddings=False, heads=4, kv_heads=4, head_dim=16),
    "qwen2": replace(CONFIG, qkv_bias=True, heads=2, kv_heads=1),
    "qwen3": replace(CONFIG, qk_norm=True, head_dim=64, heads=4),
    "mistral": replace(CONFIG, sliding_window=19),
}


def weights_of(config: ModelConfig) -> dict[str, StoredWeight]:
    """Random weights on a grid that 8 bits hold without loss, norms and biases of some size."""
    source = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in weight_shapes(config).items():
        if len(shape) == 1:
            weights[name] = stored(torch.rand(shape, generator=source) + (0.5 if "norm" in name else -0.5))
        else:
            grid = torch.randint(-127, 128, shape, generator=source).float()
            grid[:, ::32] = 127  # the largest of its block, so that the scale is the step
            weights[name] = stored(grid / 512)
    return weights


def pool_of(model: Model, tokens: int) -> PagePool:
    config = model.config
    return PagePool(
        layers=config.layers,
        pages=-(-tokens // PAGE),
        page_size=PAGE,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )


def spans_batch(
    ids: list[NDArray[np.int32]], starts: list[int], tables: list[list[int]], detail: list[int] | None
) -> Batch:
    """One step over a span of each sequence: its `ids` from position `starts` on; every place is a row."""
    counts = np.array([len(tokens) for tokens in ids], np.int32)
    positions = [np.arange(start, start + len(tokens)) for start, tokens in zip(starts, ids, strict=True)]
    slots = [np.array(table)[p // PAGE] * PAGE + p % PAGE for table, p in zip(tables, positions, strict=True)]
    width = max(map(len, tables))
    return Batch(
        tokens=np.concatenate(ids),
        slots=np.concatenate(slots).astype(np.int64),
        offsets=(np.cumsum(counts) - counts).astype(np.int32),
        counts=counts,
        starts=np.array(starts, np.int32),
        tables=np.array([table + [0] * (width - len(table)) for table in tables], np.int32),
        rows=np.arange(counts.sum(), dtype=np.int32),
        detail=Detail(
            layers=np.array(detail, np.int32),
            spans=np.arange(len(ids), dtype=np.int32),
            prompt_lengths=np.array([5] * len(ids), np.int32),
        )
        if detail
        else None,
    )


def native_model(
    library: ctypes.CDLL, config: ModelConfig, threads: int = 2, compensation: float = 0.0
) -> NativeLlama:
    return NativeLlama(
        config,
        weights_of(config),
        library,
        name="cpu",
        bits=8,
        threads=threads,
        positions=512,
        compensation=compensation,
    )


def close(ours: Output, theirs: Output) -> None:
    """Equal within what activations of 8 bits, or of bf16, leave."""
    spread = float(theirs.logits.std())
    assert spread > 0.1, "logits of a size that could disagree"
    assert float((ours.logits - theirs.logits).square().mean().sqrt()) < 0.05 * spread
    for name in ("lse", "entropy", "values"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=0.2 * spread)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_the_reference_computes_it(native: ctypes.CDLL, family: str) -> None:
    """Prompts in chunks beside decodes, in one pool, with layer detail of all rows."""
    config = FAMILIES[family]
    ours = native_model(native, config)
    theirs = Llama(config, weights_of(config), torch.float32, kernels.load("reference"))
    source = np.random.default_rng(3)
    ids = source.integers(0, config.vocab, (3, 120)).astype(np.int32)
    lengths = [(0, 1, 0), (61, 30, 2), (1, 60, 1), (50, 1, 1), (1, 1, 1), (1, 1, 1)]
    pools = [pool_of(model, 3 * 128) for model in (ours, theirs)]
    tables = [list(range(i, 48, 3)) for i in range(3)]
    starts = [0, 0, 0]
    for counts in lengths:
        there = [i for i in range(3) if counts[i]]
        batch = spans_batch(
            [ids[i, starts[i] : starts[i] + counts[i]] for i in there],
            [starts[i] for i in there],
            [tables[i] for i in there],
            list(range(config.layers)),
        )
        keep = list(range(len(batch.rows)))
        found, expected = (
            model.step(batch, pool, keep) for model, pool in zip((ours, theirs), pools, strict=True)
        )
        close(found, expected)
        np.testing.assert_allclose(found.detail.lens_entropy, expected.detail.lens_entropy, atol=0.05)
        np.testing.assert_allclose(found.detail.heads, expected.detail.heads, atol=0.05)
        np.testing.assert_array_equal(found.detail.lens_entropy[:, -1], found.entropy[_ends(batch)])
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_dead_slots_and_what_is_attended_to_as_the_reference_has_them(
    native: ctypes.CDLL, family: str
) -> None:
    """A prompt whose first chunk has lost tokens since, beside one that has not; then a decode of each."""
    config = FAMILIES[family]
    ours = native_model(native, config)
    theirs = Llama(config, weights_of(config), torch.float32, kernels.load("reference"))
    ids = np.random.default_rng(3).integers(0, config.vocab, (2, 120)).astype(np.int32)
    tables = [list(range(i, 32, 2)) for i in range(2)]
    pools = [pool_of(model, 256) for model in (ours, theirs)]
    dead = [3, 4, 5, 20, 41, 59, 60]
    starts = [0, 0]
    for counts in ((61, 30), (30, 60), (1, 1)):
        batch = spans_batch(
            [
                ids[i, start : start + count]
                for i, (start, count) in enumerate(zip(starts, counts, strict=True))
            ],
            starts,
            tables,
            list(range(config.layers)),
        )
        batch = replace(batch, scored=np.array([80, 25], np.int32))
        keep = list(range(len(batch.rows)))
        found, expected = (
            model.step(batch, pool, keep) for model, pool in zip((ours, theirs), pools, strict=True)
        )
        close(found, expected)
        np.testing.assert_allclose(found.detail.heads, expected.detail.heads, atol=0.05)
        assert found.mass.keys() == expected.mass.keys()
        for span, mass in found.mass.items():
            end = starts[span] + counts[span]
            queries = end - max(int(batch.scored[span]), starts[span])
            np.testing.assert_allclose(mass, expected.mass[span], atol=0.03 * queries)
            assert mass.sum() == pytest.approx(queries, rel=0.02)
            assert span or not mass[dead].any()
        starts = [start + count for start, count in zip(starts, counts, strict=True)]
        if starts[0] == 61:
            assert set(found.mass) == {1}
            for pool in pools:
                lost = np.array(tables[0])[np.array(dead) // PAGE], np.array(dead) % PAGE
                pool.dead[lost] = True
                pool.keys[:, *lost] = pool.values[:, *lost] = 50.0


@pytest.mark.parametrize("family", ["llama", "untied"])
def test_the_head_gives_hidden_states_the_step_s_own_logits(native: ctypes.CDLL, family: str) -> None:
    config = FAMILIES[family]
    ids = np.random.default_rng(4).integers(0, config.vocab, (3, 20)).astype(np.int32)
    batch = spans_batch(list(ids), [0] * 3, [[i, i + 3, i + 6] for i in range(3)], None)
    batch = replace(batch, rows=_ends(batch), hidden=True)
    for model in (
        native_model(native, config),
        Llama(config, weights_of(config), torch.float32, kernels.load("reference")),
    ):
        found = model.step(batch, pool_of(model, 9 * PAGE), [0, 1, 2])
        assert found.hidden is not None
        assert torch.equal(model.head(found.hidden), found.logits)
        again = with_rows(found, [1], found.logits[[1]], entropy(found.logits[[1]]))
        np.testing.assert_allclose(again.lse, found.lse, rtol=1e-5)
        np.testing.assert_allclose(again.entropy, found.entropy, rtol=1e-4)
        np.testing.assert_array_equal(again.ids, found.ids)
        assert torch.equal(again.logits, found.logits)
        other = with_rows(found, [2], found.logits[[0]], entropy(found.logits[[0]]))
        np.testing.assert_array_equal(other.ids, found.ids[[0, 1, 0]])
        assert torch.equal(other.logits, found.logits[[0, 1, 0]])


def _ends(batch: Batch) -> NDArray[np.int32]:
    return batch.offsets + batch.counts - 1


def test_threads_that_cannot_be_started_are_an_error() -> None:
    """In a process whose memory holds but a few stacks; it must not be aborted."""
    code = (
        "import resource; from pathlib import Path; from tests.engine.cpu import test_native as t\n"
        "library = t.open_library(t.build.instruction_sets()[0], t.EngineSettings().kernel_cache)\n"
        "now = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), resource.RLIM_INFINITY))\n"
        "t.native_model(library, t.CONFIG, threads=1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "MemoryError" in done.stderr and "QUAVER_THREADS" in done.stderr


@pytest.mark.parametrize("compensation", [0.0, 0.15])
def test_a_row_is_the_same_alone_and_in_a_batch_for_any_number_of_threads(
    native: ctypes.CDLL, compensation: float
) -> None:
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab, (7, 40)).astype(np.int32)
    tables = [list(range(i, 35, 7)) for i in range(7)]

    def decoded(threads: int, groups: list[list[int]]) -> torch.Tensor:
        model = native_model(native, CONFIG, threads, compensation=compensation)
        pool = pool_of(model, 7 * 40)
        for i in range(7):
            model.step(spans_batch([ids[i, :39]], [0], [tables[i]], None), pool, [])
        rows = []
        for group in groups:
            last = spans_batch(
                [ids[i, 39:] for i in group], [39] * len(group), [tables[i] for i in group], None
            )
            rows.append(model.step(last, pool, list(range(len(group)))).logits)
        return torch.cat(rows)

    alone, together = [[i] for i in range(7)], [list(range(7))]
    first = decoded(1, alone)
    assert all(torch.equal(first, decoded(*how)) for how in ((1, together), (2, alone), (2, together)))


def test_compensation_brings_a_decode_nearer_to_exact_activations(native: ctypes.CDLL) -> None:
    """Against a pool of the reference's own: only the last token's products differ."""
    theirs = Llama(CONFIG, weights_of(CONFIG), torch.bfloat16, kernels.load("reference"))
    exact = Llama(CONFIG, weights_of(CONFIG), torch.float32, kernels.load("reference"))
    ids = np.random.default_rng(2).integers(0, CONFIG.vocab, 33).astype(np.int32)
    table = list(range(5))
    pool = pool_of(theirs, 40)
    theirs.step(spans_batch([ids[:32]], [0], [table], None), pool, [])
    wide = pool_of(exact, 40)
    wide.keys.copy_(pool.keys)
    wide.values.copy_(pool.values)
    last = spans_batch([ids[32:]], [32], [table], None)
    expected = exact.step(last, wide, [0]).logits
    models = [native_model(native, CONFIG, compensation=share) for share in (0.0, 0.5, 1.0)]
    errors = [float((model.step(last, pool, [0]).logits - expected).abs().mean()) for model in models]
    assert errors[2] < errors[1] < errors[0], errors


def greedy(model: Model, prompts: list[list[int]], **changes: object) -> dict[str, list[int]]:
    engine = Engine(model, EngineSettings(**({"kv_tokens": 2048, "deterministic": True} | changes)))
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        engine.submit(Submit(meta=RequestMeta(request_id=f"r{i}"), token_ids=prompt, params=params))
    answers: dict[str, list[int]] = {f"r{i}": [] for i in range(len(prompts))}
    while engine.has_work:
        output = engine.step()
        for request_id, token in zip(
            output.request_ids, np.frombuffer(output.token_ids, np.int32).tolist(), strict=True
        ):
            answers[request_id].append(token)
    engine.check()
    return answers


def test_answers_do_not_depend_on_signals(native: ctypes.CDLL) -> None:
    model = native_model(native, CONFIG)
    prompts = [list(range(1, 1 + n)) for n in (1, 2, 33, 70)]
    off, budget, full = (greedy(model, prompts, signal_budget=share) for share in (0.0, 0.03, 1.0))
    assert off == budget == full


def test_answers_in_deterministic_mode_do_not_depend_on_neighbours(native: ctypes.CDLL) -> None:
    model = native_model(native, CONFIG)
    prompts = [list(range(1, 1 + n)) for n in (1, 2, 33, 70)]
    together = greedy(model, prompts)
    assert all(greedy(model, [prompt])["r0"] == together[f"r{i}"] for i, prompt in enumerate(prompts))


@pytest.mark.model
def test_the_real_model_at_its_stored_bits(smollm: Path) -> None:
    """Four-bit layers as stored; prompt of 300 tokens in one step, then decodes, and a context of 8,192."""
    native = open_library(build.instruction_sets()[0], EngineSettings().kernel_cache)
    loaded = load(smollm)
    ours = NativeLlama(loaded.config, loaded.weights, native, name="cpu", bits=4, threads=2, positions=8192)
    theirs = Llama(loaded.config, loaded.weights, torch.float32, kernels.load("reference"))
    text = (Path(__file__).parents[3] / "docs" / "signals.md").read_text()
    ids = np.array(loaded.tokenizer.encode(text)[:308], np.int32)
    table = list(range(40))
    pools = [pool_of(model, 320) for model in (ours, theirs)]
    found, expected = [], []
    for start, stop in ((0, 300), *((i, i + 1) for i in range(300, 308))):
        batch = spans_batch([ids[start:stop]], [start], [table], None)
        keep = list(range(stop - start))
        found.append(ours.step(batch, pools[0], keep).logits)
        expected.append(theirs.step(batch, pools[1], keep).logits)
    ours_logits, their_logits = torch.cat(found), torch.cat(expected)
    agreed = (ours_logits.argmax(-1) == their_logits.argmax(-1)).float().mean()
    assert agreed > 0.94
    target = torch.from_numpy(ids[1:]).long()
    losses = [float(cross_entropy(logits[:-1], target)) for logits in (ours_logits, their_logits)]
    assert abs(losses[0] - losses[1]) < 0.02, losses

    pool = pool_of(ours, 8192)
    long = np.resize(ids, 8192).astype(np.int32)
    pages = list(range(8192 // PAGE))
    for start in range(0, 8191, 1024):
        batch = spans_batch([long[start : min(start + 1024, 8191)]], [start], [pages], None)
        ours.step(batch, pool, [])
    last = ours.step(spans_batch([long[8191:]], [8191], [pages], [0, 29]), pool, [0])
    assert torch.isfinite(last.logits).all()
    assert np.isfinite(last.detail.heads[:, :4]).all()


def test_a_long_context_shared_by_threads_gives_the_same_bits(native: ctypes.CDLL) -> None:
    """Bits do not tell how many threads there were; with the heads' weights on one layer of two."""
    source = np.random.default_rng(4)
    config = replace(CONFIG, max_context=2048)
    ids = source.integers(0, config.vocab, 1300).astype(np.int32)
    table = list(range(1304 // PAGE))
    answers = []
    for threads in (1, 4):
        model = NativeLlama(
            config, weights_of(config), native, name="cpu", bits=8, threads=threads, positions=2048
        )
        pool = pool_of(model, 1304)
        for start in range(0, 1299, 433):
            model.step(spans_batch([ids[start : start + 433]], [start], [table], None), pool, [])
        last = model.step(spans_batch([ids[1299:]], [1299], [table], [1, 2]), pool, [0])
        answers.append((last.logits.numpy(), last.detail.heads, last.detail.lens_entropy))
    for one, other in zip(*answers, strict=True):
        np.testing.assert_array_equal(one, other)
