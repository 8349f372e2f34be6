"""The engine on a small random model: what it emits, what it frees, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core import Engine, RequestError
from engine.kv.disk_files import Files
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS, RequestMeta, SamplingParams, StepOutput, Submit
from engine.settings import EngineSettings
from tests.engine.tiny import TINY, random_model

CONFIG = replace(TINY, layers=5, max_context=256)


MODEL = random_model(CONFIG, seed=7)


def engine(**changes: object) -> Engine:
    values = {"kv_tokens": 1024, "page_size": 4, "max_running": 8, "signal_budget": 1.0}
    return Engine(MODEL, EngineSettings(**(values | changes)))


def submit(request_id: str, prompt: list[int], choice: int = 0, **params: object) -> Submit:
    values = {"max_tokens": 6, "ignore_eos": True} | params
    return Submit(
        meta=RequestMeta(request_id=request_id),
        choice=choice,
        token_ids=prompt,
        params=SamplingParams(**values),
    )


class Collected:
    """The columns of many steps, by (request, choice)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.signals: dict[tuple[str, int], list[np.ndarray]] = {}
        self.lens: dict[tuple[str, int], dict[int, np.ndarray]] = {}
        self.heads: dict[tuple[str, int], dict[int, np.ndarray]] = {}
        self.finished: dict[tuple[str, int], str] = {}

    def add(self, output: StepOutput) -> None:
        rows = len(output.request_ids)
        signals = np.frombuffer(output.signals, np.float32).reshape(rows, len(TOKEN_SIGNALS))
        tokens = np.frombuffer(output.token_ids, np.int32)
        keys = list(zip(output.request_ids, output.choices, strict=True))
        for key, step, token, row in zip(keys, output.steps, tokens, signals, strict=True):
            assert step == len(self.tokens.setdefault(key, []))
            self.tokens[key].append(int(token))
            self.signals.setdefault(key, []).append(row)
        count, layers = len(output.detail_rows), len(output.layers)
        lens = np.frombuffer(output.lens_entropy, np.float16).reshape(count, layers)
        shape = (count, len(HEAD_SIGNALS), layers, output.heads_per_layer)
        heads = np.frombuffer(output.heads, np.float16).reshape(shape)
        for place, row in enumerate(output.detail_rows):
            self.lens.setdefault(keys[row], {})[output.steps[row]] = lens[place]
            self.heads.setdefault(keys[row], {})[output.steps[row]] = heads[place]
        for end in output.finished:
            key = (end.request_id, end.choice)
            assert key not in self.finished
            self.finished[key] = end.reason


def run(target: Engine, *requests: Submit) -> Collected:
    for request in requests:
        target.submit(request)
    collected = Collected()
    while target.has_work:
        collected.add(target.step())
        target.check()
    assert target.pool.free == target.pool.pages
    return collected


PROMPTS = [[3, 4, 5], [9], list(range(1, 40)), [7, 7, 7, 7, 8], list(range(20, 52)), [1, 2]]


def together(**changes: object) -> Collected:
    return run(engine(**changes), *(submit(f"r{i}", p, max_tokens=5 + i) for i, p in enumerate(PROMPTS)))


def test_every_choice_ends_once_with_its_length() -> None:
    found = together()
    assert {key[0]: len(tokens) for key, tokens in found.tokens.items()} == {
        f"r{i}": 5 + i for i in range(len(PROMPTS))
    }
    assert set(found.finished.values()) == {"length"}


@pytest.mark.parametrize(
    "changes",
    [{"step_tokens": 3}, {"step_tokens": 17}, {"max_running": 1}, {"page_size": 16}, {"deterministic": True}],
    ids=str,
)
def test_batch_and_chunking_do_not_change_tokens_or_signals(changes: dict[str, object]) -> None:
    one, other = together(), together(**changes)
    assert one.tokens == other.tokens
    for key, rows in one.signals.items():
        np.testing.assert_allclose(rows, other.signals[key], atol=2e-4)
        for step, lens in one.lens[key].items():
            np.testing.assert_allclose(lens, other.lens[key][step], atol=1e-2)
            np.testing.assert_allclose(one.heads[key][step], other.heads[key][step], atol=1e-2)


def test_deterministic_mode_is_bit_identical_whatever_runs_beside() -> None:
    settings = {"deterministic": True, "step_tokens": 8}
    crowd = together(**settings)
    for i, prompt in enumerate(PROMPTS):
        alone = run(engine(**settings), submit(f"r{i}", prompt, max_tokens=5 + i))
        key = (f"r{i}", 0)
        assert alone.tokens[key] == crowd.tokens[key]
        assert np.array(alone.signals[key]).tobytes() == np.array(crowd.signals[key]).tobytes()


def test_signals_off_budgeted_and_full_leave_deterministic_answers_bit_identical() -> None:
    off = together(deterministic=True, signal_budget=0)
    full = together(deterministic=True, signal_budget=1)
    some = together(deterministic=True, signal_budget=0.1)
    assert off.tokens == full.tokens == some.tokens
    assert not off.lens
    assert {key: len(lens) for key, lens in full.lens.items()} == {k: len(t) for k, t in full.tokens.items()}
    assert 0 < sum(map(len, some.lens.values())) < sum(map(len, full.lens.values()))
    for key, rows in off.signals.items():
        assert np.array(rows).tobytes() == np.array(full.signals[key]).tobytes()
        assert np.array(rows).tobytes() == np.array(some.signals[key]).tobytes()


def steps_of(target: Engine, *requests: Submit) -> list[StepOutput]:
    for request in requests:
        target.submit(request)
    outputs = []
    while target.has_work:
        outputs.append(target.step())
    return outputs


def test_a_request_that_asks_has_every_layer_of_every_token_beside_one_that_does_not() -> None:
    requests = submit("asks", [5, 6], max_tokens=40, full_signals=True), submit("b", [7], max_tokens=40)
    outputs = steps_of(engine(signal_budget=0.001), *requests)
    reasons: dict[str, list[str]] = {"asks": [], "b": []}
    for output in outputs:
        for row, reason, rate in zip(
            output.detail_rows, output.detail_reasons, output.detail_rates, strict=True
        ):
            reasons[output.request_ids[row]].append(reason)
            assert output.layers == list(range(CONFIG.layers))
            assert output.layer_stride == 1
            assert (rate == 1) is (reason != "floor")
    assert reasons["asks"] == ["full"] * 40
    assert "full" not in reasons["b"] and len(reasons["b"]) < 40


def test_a_step_says_what_was_sampled_and_what_it_took() -> None:
    outputs = steps_of(
        engine(signal_budget=0.1), *(submit(f"r{i}", [9, i], max_tokens=150) for i in range(4))
    )
    sampled = [output for output in outputs if output.detail_rows]
    assert sampled
    for output in outputs:
        count = len(output.detail_rows)
        assert len(output.detail_reasons) == len(output.detail_rates) == count
        assert set(output.detail_reasons) <= {"risk", "floor"}
        assert 0 < output.detail_s < output.duration_s
        assert not count or CONFIG.layers - 1 in output.layers
    assert {layer for output in sampled for layer in output.layers} == set(range(CONFIG.layers))


def test_nothing_is_sampled_at_budget_zero_even_when_asked() -> None:
    outputs = steps_of(engine(signal_budget=0), submit("a", [5, 6], full_signals=True))
    assert all(not output.detail_rows and not output.layers for output in outputs)


def test_last_lens_layer_is_the_output_entropy() -> None:
    found = together()
    column = TOKEN_SIGNALS.index("entropy")
    for key, rows in found.signals.items():
        for step, lens in found.lens[key].items():
            assert lens[-1] == pytest.approx(rows[step][column], abs=5e-3)


def test_seeded_sampling_repeats_and_differs_between_choices() -> None:
    def draw(seed: int) -> Collected:
        requests = [
            submit("a", [5, 6], choice, temperature=1.0, seed=seed, max_tokens=20) for choice in (0, 1)
        ]
        return run(engine(), *requests)

    first, again, other = draw(3), draw(3), draw(4)
    assert first.tokens == again.tokens
    assert first.tokens["a", 0] != first.tokens["a", 1]
    assert first.tokens["a", 0] != other.tokens["a", 0]


def test_stop_tokens_and_end_of_sequence() -> None:
    greedy = run(engine(), submit("a", [5, 6], max_tokens=8)).tokens["a", 0]
    stopped = run(engine(), submit("a", [5, 6], max_tokens=8, stop_token_ids=(greedy[2],)))
    assert stopped.tokens["a", 0] == greedy[: greedy.index(greedy[2]) + 1]
    assert stopped.finished["a", 0] == "stop"


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ([], {}, "invalid_prompt"),
        ([61], {}, "invalid_prompt"),
        ([-1], {}, "invalid_prompt"),
        ([1], {"max_tokens": 0}, "invalid_max_tokens"),
        ([1] * 251, {"max_tokens": 6}, "context_length_exceeded"),
        ([1], {"logit_bias": {61: 1.0}}, "invalid_logit_bias"),
        ([1], {"top_logprobs": 21}, "invalid_top_logprobs"),
    ],
)
def test_what_can_never_run_is_refused_by_code(
    prompt: list[int], params: dict[str, object], code: str
) -> None:
    target = engine()
    with pytest.raises(RequestError) as caught:
        target.submit(submit("a", prompt, **params))
    assert caught.value.code == code
    assert not target.has_work
    target.check()


def test_a_prompt_that_fits_exactly_runs() -> None:
    found = run(engine(), submit("a", [1] * 250, max_tokens=6))
    assert len(found.tokens["a", 0]) == 6


def test_a_duplicate_is_refused_and_harms_nobody() -> None:
    target = engine()
    target.submit(submit("a", [1]))
    with pytest.raises(RequestError, match="already running"):
        target.submit(submit("a", [2]))
    assert run(target).finished == {("a", 0): "length"}


def test_aggregates_are_those_of_the_tokens() -> None:
    target = engine()
    target.submit(submit("a", [5, 6], max_tokens=9))
    collected, ends = Collected(), []
    while target.has_work:
        output = target.step()
        collected.add(output)
        ends += output.finished
    rows = np.array(collected.signals["a", 0])
    figures = ends[0].aggregates
    for column, name in enumerate(TOKEN_SIGNALS):
        assert figures[f"mean_{name}"] == pytest.approx(rows[:, column].mean(), abs=1e-5)
    assert figures["tokens"] == 9
    assert figures["min_confidence"] == pytest.approx(rows[:, TOKEN_SIGNALS.index("confidence")].min())
    lookback = [heads[HEAD_SIGNALS.index("lookback")] for heads in collected.heads["a", 0].values()]
    assert figures["mean_lookback"] == pytest.approx(np.nanmean(np.stack(lookback)), abs=1e-2)


def watch(target: Engine, *requests: Submit) -> tuple[Collected, int, int]:
    """Run; also return the prompt tokens computed and the most pages used at once."""
    for request in requests:
        target.submit(request)
    collected, computed, most = Collected(), 0, 0
    while target.has_work:
        output = target.step()
        target.check()
        collected.add(output)
        computed += output.prefill_tokens
        most = max(most, output.stats.pages_used)
    assert target.pool.free == target.pool.pages
    return collected, computed, most


def test_choices_compute_their_prompt_once_and_hold_it_once() -> None:
    prompt = list(range(1, 42))  # ten whole pages of four, and one token
    choices = [submit("a", prompt, i, temperature=1.0, seed=5, max_tokens=8) for i in range(6)]
    found, computed, most = watch(engine(), *choices)
    assert computed == 41 + 5  # each other choice computes the last token, for its logits
    assert most == 10 + 6 * 3  # the tokens 40 … 48 of each are in pages of its own
    apart = [run(engine(), choice) for choice in choices]
    for i, alone in enumerate(apart):
        assert found.tokens["a", i] == alone.tokens["a", i]
        np.testing.assert_allclose(found.signals["a", i], alone.signals["a", i], atol=2e-4)
    assert len({tuple(tokens) for tokens in found.tokens.values()}) > 1


def test_only_choices_of_one_request_with_one_prompt_share() -> None:
    one, other = list(range(1, 22)), list(range(2, 23))
    _, computed, _ = watch(engine(), submit("a", one, 0), submit("a", other, 1), submit("b", one, 0))
    assert computed == 63
    _, computed, _ = watch(engine(), submit("a", [1, 2, 3, 4], 0), submit("a", [1, 2, 3, 4], 1))
    assert computed == 8  # no whole page before the last token


@pytest.mark.parametrize("length", [8, 9, 17, 40])
@pytest.mark.parametrize("step_tokens", [4, 8])
def test_sharing_is_bit_identical_in_deterministic_mode(length: int, step_tokens: int) -> None:
    prompt = [1 + i % 50 for i in range(length)]
    settings = {"deterministic": True, "step_tokens": step_tokens}
    choices = [submit("a", prompt, i, temperature=1.0, seed=9, max_tokens=5) for i in range(3)]
    found, computed, _ = watch(engine(**settings), *choices)
    whole = (length - 1) // step_tokens * step_tokens
    assert computed == whole + 3 * (length - whole)
    for choice in choices:
        alone, key = run(engine(**settings), choice), ("a", choice.choice)
        assert found.tokens[key] == alone.tokens[key]
        assert np.array(found.signals[key]).tobytes() == np.array(alone.signals[key]).tobytes()
        for step, heads in alone.heads[key].items():
            assert found.heads[key][step].tobytes() == heads.tobytes()


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("victim", [0, 1, 2, None])
def test_an_abort_in_any_state_loses_no_page_and_harms_no_sibling(steps: int, victim: int | None) -> None:
    prompt = list(range(1, 34))
    target = engine(step_tokens=10)
    for choice in range(3):
        target.submit(submit("a", prompt, choice))
    collected = Collected()
    for _ in range(steps):
        collected.add(target.step())
    target.abort("a", victim)
    target.check()
    while target.has_work:
        collected.add(target.step())
        target.check()
    assert target.pool.free == target.pool.pages
    alone = run(engine(), submit("a", prompt)).tokens["a", 0]
    for choice in range(3):
        tokens = collected.tokens.get(("a", choice), [])
        if victim in (choice, None):
            assert collected.finished["a", choice] == "abort"
            assert tokens == alone[: len(tokens)]
        else:
            assert collected.finished["a", choice] == "length"
            assert tokens == alone


class EngineMachine(RuleBasedStateMachine):
    """Random submits, aborts and steps: nothing is lost, everything ends once."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = engine(kv_tokens=256, max_running=3, step_tokens=7)
        self.sent: set[tuple[str, int]] = set()
        self.collected = Collected()
        self.count = 0

    @rule(prompt=st.lists(st.integers(0, 60), min_size=1, max_size=30), choices=st.integers(1, 3))
    def arrive(self, prompt: list[int], choices: int) -> None:
        self.count += 1
        for choice in range(choices):
            self.engine.submit(submit(f"q{self.count}", prompt, choice, max_tokens=4, ignore_eos=False))
            self.sent.add((f"q{self.count}", choice))

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = f"q{data.draw(st.integers(1, self.count + 1))}"
        self.engine.abort(request_id, data.draw(st.none() | st.integers(0, 3)))

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def step(self) -> None:
        self.collected.add(self.engine.step())

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        while self.engine.has_work:
            self.collected.add(self.engine.step())
        self.engine.check()
        assert self.engine.pool.free == self.engine.pool.pages
        assert self.collected.finished.keys() == self.sent


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = hypothesis_settings(max_examples=25, stateful_step_count=20, deadline=None)


class ShiftHook:
    """A real hook of the simplest kind: adds a constant to token 7 of one request's rows."""

    active = on_logits = True
    on_tiers = on_pages = on_prompts = on_head = on_sampling = False
    files = Files

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id

    def logits(self, metas, choices, steps, logits):  # type: ignore[no-untyped-def]
        changed = logits.clone()
        rows = [i for i, meta in enumerate(metas) if meta.request_id == self.request_id]
        changed[rows, 7] += 100
        return changed, {i: ["f1"] for i in rows}


def test_a_fault_is_named_once_and_leaves_other_requests_bit_identical() -> None:
    clean = run(engine(deterministic=True), submit("a", [5, 6]), submit("b", [8, 9]))
    target = engine(deterministic=True)
    target.hooked.hook = ShiftHook("a")
    for request in (submit("a", [5, 6]), submit("b", [8, 9])):
        target.submit(request)
    found, touched = Collected(), []
    while target.has_work:
        output = target.step()
        touched.append(output.touched)
        found.add(output)
        target.check()
    assert [mark for mark in touched if mark] == [{"a": ["f1"]}]
    assert set(found.tokens["a", 0]) == {7}
    assert found.tokens["b", 0] == clean.tokens["b", 0]
    assert np.array(found.signals["b", 0]).tobytes() == np.array(clean.signals["b", 0]).tobytes()
    confidence, post = TOKEN_SIGNALS.index("confidence"), TOKEN_SIGNALS.index("surprisal_post")
    assert all(row[post] < 1e-3 for row in found.signals["a", 0])
    assert found.signals["a", 0][0][confidence] < 0.5
