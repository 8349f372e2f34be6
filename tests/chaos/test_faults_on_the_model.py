"""Faults on the real engine: what they must leave alone, bit for bit, and what they must move."""

import time

import numpy as np
import pytest

from chaos.faults.registry import KINDS
from chaos.model_hook import factory
from chaos.probes import judge
from chaos.prompt_hook import PromptHook
from chaos.prompts import generate
from chaos.tokens import token_pieces
from engine.core import load_engine
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS, AttachFault, RequestMeta, SamplingParams, Submit
from engine.models.loader import load_tokenizer
from engine.models.store import ModelNotFound, resolve
from engine.settings import EngineSettings

pytestmark = pytest.mark.model
ITEMS = generate("test", 4, seed=21)
CONFIDENCE = TOKEN_SIGNALS.index("confidence")
RAW = [TOKEN_SIGNALS.index(name) for name in ("surprisal", "entropy")]
POST = [TOKEN_SIGNALS.index(name) for name in ("surprisal_post", "entropy_post")]


class Bench:
    """One engine with the chaos hook, and the answers it gives."""

    def __init__(self):
        settings = EngineSettings(deterministic=True, threads=1, signal_budget=0, kv_tokens=4096)
        path = resolve(settings.model, settings.model_cache)
        self.hook = factory()
        self.tokenizer = load_tokenizer(path)
        self.prompts = PromptHook(token_pieces(self.tokenizer))
        self.engine = load_engine(settings, self.hook)

    def watching(self):
        """Return another engine, with the signals of every layer."""
        settings = EngineSettings(deterministic=True, threads=1, signal_budget=1, kv_tokens=4096)
        return load_engine(settings, factory())

    def run(self, tenants, temperature=0.7):
        """Return, per item, its token ids and float32 [tokens, signals]; and the requests touched."""
        self.submit(tenants, temperature)
        return self.collect()

    def submit(self, tenants, temperature):
        for item, tenant in zip(ITEMS, tenants, strict=True):
            meta = RequestMeta(request_id=item.id, tenant=tenant)
            messages, _ = self.prompts.apply(meta, item.messages)
            params = SamplingParams(max_tokens=12, temperature=temperature, seed=5)
            ids = self.tokenizer.encode_prompt(self.tokenizer.chat(messages))
            self.engine.submit(Submit(meta=meta, token_ids=ids, params=params))

    def collect(self):
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


#: Of each kind, what is struck so hard that it shows.
HARD = {
    "noise": {"sigma": 3.0},
    "hidden_noise": {"sigma": 1.0},
    "head_noise": {"sigma": 1.0},
    "sampler": {"temperature": 4.0},
    "head_stuck": {"pull": 8.0},
    "slow_prefill": {"delay_ms": 2.0},
}


def attach(bench, kind, params, ttl_s=300.0, **selector):
    message = AttachFault(fault_id="f", kind=kind, params=params, selector=selector, seed=1, ttl_s=ttl_s)
    bench.hook.attach(message)


def same(one, other, name):
    """Tell whether two runs gave a request the same tokens and signals, bit for bit."""
    return one[0][name] == other[0][name] and np.array_equal(one[1][name], other[1][name])


@pytest.mark.parametrize("kind", HARD)
def test_unmatched_requests_are_bit_identical_and_matched_ones_suffer(bench, clean, kind):
    attach(bench, kind, HARD[kind], tenant="hurt")
    tenants = ["gold", "hurt"] * 2
    struck = bench.run(tenants)
    assert struck[2] == {item.id for item, tenant in zip(ITEMS, tenants, strict=True) if tenant == "hurt"}
    for item, tenant in zip(ITEMS, tenants, strict=True):
        assert same(struck, clean, item.id) == (tenant == "gold" or kind == "slow_prefill")


@pytest.mark.parametrize("kind", HARD)
def test_the_control_changes_nothing(bench, clean, kind):
    attach(bench, kind, {**HARD[kind], **KINDS[kind].control})
    control = bench.run(["gold"] * 4)
    assert all(same(control, clean, item.id) for item in ITEMS)
    assert control[2] == {item.id for item in ITEMS}


@pytest.mark.parametrize("kind", HARD)
def test_a_lease_that_is_over_acts_no_more(bench, clean, kind):
    attach(bench, kind, HARD[kind], ttl_s=0.02)
    time.sleep(0.03)
    after = bench.run(["gold"] * 4)
    assert all(same(after, clean, item.id) for item in ITEMS)
    assert not after[2]


@pytest.mark.parametrize("kind", ["hidden_noise", "head_noise"])
def test_what_the_model_says_is_what_raw_signals_show(bench, clean, kind):
    attach(bench, kind, HARD[kind])
    tokens, signals, _ = bench.run(["gold"] * 4)
    rows = np.concatenate(list(signals.values()))
    assert np.array_equal(rows[:, RAW], rows[:, POST])  # nothing is done to logits: before is after
    before = np.concatenate(list(clean[1].values()))[:, CONFIDENCE].mean()
    assert rows[:, CONFIDENCE].mean() < before - 0.1
    bench.hook.detach(None)
    attach(bench, kind, HARD[kind])
    assert bench.run(["gold"] * 4)[0] == tokens  # the same seed strikes the same


def test_a_sampler_makes_greedy_requests_draw_and_hot_ones_choose(bench):
    greedy = bench.run(["gold"] * 4, temperature=0.0)
    attach(bench, "sampler", {"temperature": 0.0})
    cold = bench.run(["gold"] * 4, temperature=0.7)
    assert cold[0] == greedy[0]
    bench.hook.detach(None)
    attach(bench, "sampler", {"temperature": 3.0})
    hot = bench.run(["gold"] * 4, temperature=0.0)
    ranks = np.concatenate(list(hot[1].values()))[:, TOKEN_SIGNALS.index("rank")]
    assert (ranks > 1).mean() > 0.3
    assert bench.run(["gold"] * 4, temperature=0.0)[0] == hot[0]
    bench.hook.detach(None)
    attach(bench, "sampler", {"temperature": 5.0, "top_k": 1})
    assert bench.run(["gold"] * 4, temperature=1.0)[0] == greedy[0]


def test_a_held_prompt_waits_and_others_finish_meanwhile(bench, clean):
    attach(bench, "slow_prefill", {"delay_ms": 10_000.0}, tenant="hurt")
    tenants = ["gold", "hurt"] * 2
    bench.submit(tenants, 0.7)
    hurt = {item.id for item, tenant in zip(ITEMS, tenants, strict=True) if tenant == "hurt"}
    over = set()
    while len(over) < 2:
        output = bench.engine.step()
        assert not hurt & set(output.request_ids)
        over |= {finish.request_id for finish in output.finished}
    assert not over & hurt
    idle = bench.engine.step()
    assert not idle.request_ids and bench.engine.has_work
    bench.hook.detach("f")  # whoever ends it lets them go
    tokens, signals, touched = bench.collect()
    assert not touched  # it was told before
    assert all(same((tokens, signals), clean, name) for name in hurt)


def test_a_stuck_head_looks_at_its_position_and_heads_of_other_keys_do_not(bench):
    engine, sink = bench.watching(), HEAD_SIGNALS.index("sink_mass")

    def masses(**params):
        if params:
            message = AttachFault(fault_id="f", kind="head_stuck", params=params, ttl_s=300.0)
            engine.hook.attach(message)
        found = []
        ids = bench.tokenizer.encode_prompt(bench.tokenizer.chat(ITEMS[0].messages))
        answer = SamplingParams(max_tokens=6, ignore_eos=True, full_signals=True)
        engine.submit(Submit(meta=RequestMeta(request_id="r"), token_ids=ids, params=answer))
        while engine.has_work:
            output = engine.step()
            if output.heads:
                shape = (-1, len(HEAD_SIGNALS), len(output.layers), output.heads_per_layer)
                found.append(np.frombuffer(output.heads, "<f2").astype(float).reshape(shape)[0, sink])
        engine.hook.detach(None)
        return found

    free, stuck = masses(), masses(layer=4, head=3, pull=40.0)
    assert np.array_equal(free[0], stuck[0])  # it strikes before the second token
    before, after = np.array(free[1:])[:, 4], np.array(stuck[1:])[:, 4]
    group = slice(3, 6)  # three query heads read the keys of one
    assert after[:, group].min() > 0.95
    assert np.array_equal(np.delete(after[0], [3, 4, 5]), np.delete(before[0], [3, 4, 5]))
    assert before[:, group].mean() < 0.9


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
