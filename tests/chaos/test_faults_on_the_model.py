"""Faults on the real engine: what they must leave alone, bit for bit, and what they must move."""

import numpy as np
import pytest

from chaos.model_hook import factory
from chaos.probes import judge
from chaos.prompt_hook import PromptHook
from chaos.prompts import generate
from chaos.tokens import token_pieces
from engine.core import load_engine
from engine.messages import TOKEN_SIGNALS, AttachFault, RequestMeta, SamplingParams, Submit
from engine.models.loader import load_tokenizer
from engine.models.store import ModelNotFound, resolve
from engine.settings import EngineSettings

pytestmark = pytest.mark.model
ITEMS = generate("test", 4, seed=21)
CONFIDENCE = TOKEN_SIGNALS.index("confidence")


class Bench:
    """One engine with the chaos hook, and the answers it gives."""

    def __init__(self):
        settings = EngineSettings(deterministic=True, threads=1, signal_budget=0, kv_tokens=4096)
        path = resolve(settings.model, settings.model_cache)
        self.hook = factory()
        self.tokenizer = load_tokenizer(path)
        self.prompts = PromptHook(token_pieces(self.tokenizer))
        self.engine = load_engine(settings, self.hook)

    def run(self, tenants, temperature=0.7):
        """Return, per item, its token ids and float32 [tokens, signals]; and the requests touched."""
        for item, tenant in zip(ITEMS, tenants, strict=True):
            meta = RequestMeta(request_id=item.id, tenant=tenant)
            messages, _ = self.prompts.apply(meta, item.messages)
            params = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
            ids = self.tokenizer.encode_prompt(self.tokenizer.chat(messages))
            self.engine.submit(Submit(meta=meta, token_ids=ids, params=params))
        tokens = {item.id: [] for item in ITEMS}
        signals = {item.id: [] for item in ITEMS}
        touched = set()
        while self.engine.has_work:
            output = self.engine.step()
            touched |= set(output.touched)
            columns = np.frombuffer(output.signals, "<f4").reshape(-1, len(TOKEN_SIGNALS))
            for row, name in enumerate(output.request_ids):
                tokens[name].append(int(np.frombuffer(output.token_ids, "<i4")[row]))
                signals[name].append(columns[row])
        self.engine.check()
        return tokens, {name: np.array(rows) for name, rows in signals.items()}, touched

    def right(self, tokens):
        """Return how many of the items were answered rightly."""
        ends = self.tokenizer.eos_ids
        texts = {
            name: self.tokenizer.decode([t for t in ids if t not in ends]) for name, ids in tokens.items()
        }
        return sum(judge(item, texts[item.id]).correct for item in ITEMS)


@pytest.fixture(scope="module")
def bench():
    try:
        return Bench()
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def clean(bench):
    return bench.run(["gold"] * 4)


@pytest.fixture(autouse=True)
def _no_fault_left(bench):
    yield
    bench.hook.detach(None)
    bench.prompts.detach(None)


def noise(sigma, **selector):
    params = {"sigma": sigma}
    return AttachFault(fault_id="n", kind="noise", params=params, selector=selector, seed=1, ttl_s=300.0)


def test_unmatched_requests_are_bit_identical_and_matched_ones_suffer(bench, clean):
    bench.hook.attach(noise(3.0, tenant="hurt"))
    tenants = ["gold", "hurt"] * 2
    tokens, signals, touched = bench.run(tenants)
    assert touched == {item.id for item, tenant in zip(ITEMS, tenants, strict=True) if tenant == "hurt"}
    for item, tenant in zip(ITEMS, tenants, strict=True):
        if tenant == "gold":
            assert tokens[item.id] == clean[0][item.id]
            assert np.array_equal(signals[item.id], clean[1][item.id])
    hurt = [item.id for item in ITEMS[1::2]]
    before = np.concatenate([clean[1][name] for name in hurt])[:, CONFIDENCE].mean()
    after = np.concatenate([signals[name] for name in hurt])[:, CONFIDENCE].mean()
    assert after < before - 0.1


def test_the_control_of_noise_changes_nothing(bench, clean):
    bench.hook.attach(noise(0.0))
    tokens, signals, touched = bench.run(["gold"] * 4)
    assert tokens == clean[0]
    assert all(np.array_equal(signals[name], clean[1][name]) for name in signals)
    assert len(touched) == 4


def test_truncation_takes_answers_away_and_its_control_does_not(bench, clean):
    fault = {"side": "suffix", "ratio": 0.4}
    right = {}
    for spare in (False, True):
        params = {**fault, "spare_question": spare}
        bench.prompts.attach(AttachFault(fault_id="t", kind="truncation", params=params, ttl_s=300.0))
        right[spare] = bench.right(bench.run(["gold"] * 4, temperature=0.0)[0])
        bench.prompts.detach(None)
    assert right[False] <= 1
    assert right[True] >= 2
