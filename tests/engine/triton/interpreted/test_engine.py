"""An engine on the Triton backend, interpreted, beside one on the reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.core import Engine
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS, RequestMeta, SamplingParams, Submit
from engine.models.backend import model_of
from engine.models.config import weight_shapes
from engine.models.weights import stored
from engine.settings import EngineSettings
from tests.engine.tiny import TINY

#: Everything that near relatives of Llama add.
CONFIG = replace(TINY, qkv_bias=True, qk_norm=True, sliding_window=11)
#: A prompt in chunks, a single token after a longer prompt, and a prompt of two choices.
PROMPTS = ([3, 4], list(range(1, 14)), [9], [7, 8, 7, 8, 9, 1])
CHOICES = (1, 1, 1, 2)
#: What takes the logits of a row.
DRAWN = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.3, "logit_bias": {4: 1.0}}


def engine(backend: str, **changes: Any) -> Engine:
    """An engine on a random model, loaded as the server would load it."""
    source = torch.Generator().manual_seed(7)
    weights = {
        name: stored(1.0 * ("norm" in name) + 0.3 * torch.randn(shape, generator=source))
        for name, shape in weight_shapes(CONFIG).items()
    }
    limits = {"kv_tokens": 256, "page_size": 4, "max_running": 8, "step_tokens": 8, "max_context": 64}
    settings = EngineSettings(
        backend=backend, **({"dtype": "float32", "signal_budget": 1.0} | limits | changes)
    )
    loaded: Any = SimpleNamespace(config=CONFIG, weights=weights)
    return Engine(model_of(loaded, settings), settings)


Rows = dict[tuple[str, int], list[Any]]


def answers(
    target: Engine, prompts: tuple[int, ...] = (0, 1, 2, 3), drawn: tuple[int, ...] = ()
) -> tuple[Rows, ...]:
    """Tokens, signals, lens entropies and heads of each choice, a row a token."""
    for i in prompts:
        changes: dict[str, Any] = DRAWN if i in drawn else {}
        wanted = SamplingParams(max_tokens=3, ignore_eos=True, seed=5, **changes)
        for choice in range(CHOICES[i]):
            meta = RequestMeta(request_id=f"r{i}")
            target.submit(Submit(meta=meta, choice=choice, token_ids=PROMPTS[i], params=wanted))
    found: tuple[Rows, ...] = ({}, {}, {}, {})
    while target.has_work:
        output = target.step()
        target.check()
        keys = list(zip(output.request_ids, output.choices, strict=True))
        detailed, layers = [keys[row] for row in output.detail_rows], len(output.layers)
        heads = (len(detailed), len(HEAD_SIGNALS), layers, output.heads_per_layer)
        columns = (
            (keys, np.frombuffer(output.token_ids, np.int32).tolist()),
            (keys, np.frombuffer(output.signals, np.float32).reshape(len(keys), len(TOKEN_SIGNALS))),
            (detailed, np.frombuffer(output.lens_entropy, np.float16).reshape(len(detailed), layers)),
            (detailed, np.frombuffer(output.heads, np.float16).reshape(heads)),
        )
        for rows, (owners, values) in zip(found, columns, strict=True):
            for key, value in zip(owners, values, strict=True):
                rows.setdefault(key, []).append(value)
    assert target.pool.free == target.pool.pages
    return found


def compare(found: tuple[Rows, ...], expected: tuple[Rows, ...]) -> None:
    assert found[0] == expected[0]
    assert found[0].keys() == expected[3].keys()
    for rows, wanted, tolerance in zip(found[1:], expected[1:], (2e-3, 5e-3, 5e-3), strict=True):
        assert rows.keys() == wanted.keys()
        for key, values in rows.items():
            np.testing.assert_allclose(values, wanted[key], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("drawn", [(), (0, 3)], ids=["greedy", "drawn"])
def test_answers_and_signals_are_the_references(drawn: tuple[int, ...]) -> None:
    """Prompts in chunks beside decodes, two choices of one prompt, kept logits, detail of every token."""
    found, expected = (answers(engine(backend), drawn=drawn) for backend in ("triton", "reference"))
    compare(found, expected)


def test_deterministic_answers_depend_on_their_own_request_alone() -> None:
    """Bit by bit: in a crowd, alone, and without detail."""
    crowd = answers(engine("triton", deterministic=True), (1, 3))
    plain = answers(engine("triton", deterministic=True, signal_budget=0.0), (1,))
    key = ("r1", 0)
    assert plain[0][key] == crowd[0][key]
    assert np.array(plain[1][key]).tobytes() == np.array(crowd[1][key]).tobytes()
    assert not plain[2]


def test_it_names_itself_and_takes_bfloat16() -> None:
    target = engine("triton", dtype="bfloat16")
    assert target.ready().backend == "triton-interpreter"
    assert target.ready().dtype == "bfloat16"
    assert target.pool.keys.device == target.model.device == torch.device("cpu")
    found, expected = answers(target, (0,)), answers(engine("reference", dtype="bfloat16"), (0,))
    np.testing.assert_allclose(found[1]["r0", 0][0], expected[1]["r0", 0][0], atol=0.1, rtol=0.1)
