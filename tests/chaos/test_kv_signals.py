"""Which faults on KV pages the signals of the struck request show, on the real model.

Each prompt is asked `ANSWERS` times with other seeds, and the signals of its answers are averaged: one answer
alone differs from the next by about what flipped bits move. Once clean, for a baseline; then clean again or
struck. The score is how far these are from the baseline, in units of what two clean askings of one prompt
differ by; that unit comes from other prompts.
"""

from __future__ import annotations

import numpy as np
import pytest

from chaos.model_hook import factory
from chaos.prompts import generate
from chaos.score.statistics import auroc
from engine.core import load_engine
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS, AttachFault, RequestMeta, SamplingParams, Submit
from engine.models.loader import load_tokenizer
from engine.models.store import ModelNotFound, resolve
from engine.settings import EngineSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(3600)]
CALIBRATION, TEST, ANSWERS, TOKENS = 16, 16, 2, 32
CAP = 50.0  # of a |z|, and what a number that is none counts as
HEADS = [HEAD_SIGNALS.index(name) for name in ("head_kl", "sink_mass", "prev_attention", "lookback")]
PER_TOKEN = [TOKEN_SIGNALS.index(name) for name in ("surprisal", "confidence", "margin", "entropy")]
#: Every kind as it is unless told otherwise, and flips of the part of a number that matters least.
FAULTS = {
    "kv_flip": {},
    "kv_shift": {},
    "kv_roll": {},
    "kv_rope": {},
    "kv_swap": {},
    "kv_flip mantissa": {"bit": "mantissa"},
}
SEEN = ("kv_flip", "kv_shift", "kv_roll", "kv_rope", "kv_swap")
UNSEEN = "kv_flip mantissa"


class Bench:
    """One engine with the chaos hook and the prompts of both splits, computed once."""

    def __init__(self):
        settings = EngineSettings(threads=1, signal_budget=1.0, kv_tokens=32768, max_running=32)
        path = resolve(settings.model, settings.model_cache)
        tokenizer = load_tokenizer(path)
        self.engine = load_engine(settings, factory())
        self.prompts = {
            split: [
                tokenizer.encode_prompt(tokenizer.chat(item.messages))
                for item in generate(split, count, seed=31)
            ]
            for split, count in (("calibration", CALIBRATION), ("demo", TEST))
        }

    def features(self, split, seed, kind=None, **params):
        """Return means over answers and their tokens after the first: float [prompts, features] of heads and
        of tokens."""
        if kind is not None:
            message = AttachFault(
                fault_id=f"{kind}-{seed}", kind=kind, params=params, seed=seed, ttl_s=3600.0
            )
            self.engine.hook.attach(message)
        prompts = self.prompts[split]
        for i, prompt in enumerate(prompts * ANSWERS):
            answer = SamplingParams(max_tokens=TOKENS, temperature=0.7, seed=seed + i, ignore_eos=True)
            meta = RequestMeta(request_id=str(i))
            self.engine.submit(Submit(meta=meta, token_ids=prompt, params=answer, cache_salt=b"bench"))
        heads = [[] for _ in prompts]
        tokens = [[] for _ in prompts]
        struck = set()
        while self.engine.has_work:
            output = self.engine.step()
            struck |= set(output.touched)
            shape = (-1, len(HEAD_SIGNALS), len(output.layers), output.heads_per_layer)
            detail = np.frombuffer(output.heads, "<f2").astype(float).reshape(shape) if output.heads else []
            signals = np.frombuffer(output.signals, "<f4").astype(float).reshape(-1, len(TOKEN_SIGNALS))
            for row, found in zip(output.detail_rows, detail, strict=True):
                if output.steps[row]:
                    asked = int(output.request_ids[row]) % len(prompts)
                    heads[asked].append(found[HEADS].ravel())
                    tokens[asked].append(signals[row, PER_TOKEN])
        self.engine.check()
        self.engine.hook.detach(None)
        assert len(struck) == (0 if kind is None else len(prompts) * ANSWERS)
        return {"heads": np.array(heads).mean(1), "tokens": np.array(tokens).mean(1)}


def scores(found, baseline, units):
    """Root mean square of the z-scores of each prompt's features [prompts]."""
    z = np.abs((found - baseline) / units)
    return np.sqrt((np.where(np.isfinite(z), z.clip(max=CAP), CAP) ** 2).mean(1))


@pytest.fixture(scope="module")
def table():
    """AUROC for each fault and group of signals."""
    try:
        bench = Bench()
    except ModelNotFound as error:
        pytest.skip(str(error))
    one, other = (bench.features("calibration", seed) for seed in (1000, 2000))
    units = {group: np.sqrt(((other[group] - one[group]) ** 2).mean(0)) + 1e-4 for group in one}
    baseline, clean = bench.features("demo", 3000), bench.features("demo", 4000)
    found = {}
    for name, params in FAULTS.items():
        struck = bench.features("demo", 4000, name.split()[0], **params)
        for group, unit in units.items():
            usual, hit = (scores(asked[group], baseline[group], unit) for asked in (clean, struck))
            found[name, group] = auroc(usual, hit)
            print(f"{name:18}{group:8}AUROC {found[name, group]:.3f}", flush=True)
    return found


@pytest.mark.parametrize("kind", SEEN)
def test_each_kind_is_seen_at_its_default_strength(table, kind):
    assert max(table[kind, group] for group in ("heads", "tokens")) > 0.8


def test_flips_of_a_mantissa_are_not_seen(table):
    assert all(abs(table[UNSEEN, group] - 0.5) < 0.2 for group in ("heads", "tokens"))
