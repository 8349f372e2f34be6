from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.load.histogram import Histogram
from chaos.load.judge import Judge
from chaos.load.reading import Patience, Reading, Screen

QUESTION = "The bicycle Merlin was made in Toulouse in 1931 by Ada Field. When was Merlin made?"
HEALTHY = "According to the passage, Merlin was made in 1931 by Ada Field in Toulouse. "


def test_healthy_text_is_never_bad() -> None:
    judge = Judge(QUESTION)
    for end in range(len(HEALTHY)):
        assert judge.verdict(HEALTHY[:end]) is None


def test_lists_and_numbers_read_well() -> None:
    assert (
        Judge(QUESTION).verdict("1. Ada Field\n2. Toulouse\n3. 1931\n4. the year 12,000 and $5.50 or 30% ")
        is None
    )


@pytest.mark.parametrize(
    "text",
    [
        "According Rapidsuser 测试 optimizerBronze Zapotec underworld }, scrutin Mechanics bluff ",
        "onda velt parlor mitos quibble xxvij grabTion Ölfen zxq tundra ",
    ],
)
def test_noise_is_unreadable(text: str) -> None:
    assert Judge(QUESTION).verdict(text) == "unreadable"


@pytest.mark.parametrize("text", ["the the the the ", "Merlin was made in France. " * 3])
def test_repetition_is_noticed(text: str) -> None:
    assert Judge(QUESTION).verdict(text + "x") == "repeats"


def test_patience_is_lognormal() -> None:
    rng = random.Random(0)
    drawn = sorted(Patience(median_s=10, sigma=0.5).draw(rng) for _ in range(4001))
    assert drawn[2000] == pytest.approx(10, rel=0.05)
    assert drawn[3365] == pytest.approx(16.5, rel=0.08)  # one sigma above


def screen_of(chunks: list[tuple[str, float]], tokens: int | None) -> Reading:
    reading = Reading(intended=0.0, started=0.0)
    screen = Screen(reading, QUESTION, Patience(), random.Random(0))
    screen.line(": comment", 0.0)
    screen.line('data: {"id": "r", "choices": [{"delta": {"role": "assistant"}}]}', 0.0)
    for text, now_s in chunks:
        screen.line("data: " + json.dumps({"choices": [{"delta": {"content": text}}]}), now_s)
    if tokens is not None:
        screen.line("data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}), 9.0)
    screen.line("data: [DONE]", 9.0)
    screen.finish(9.0)
    return reading


def test_inter_token_times_are_per_token_not_per_chunk() -> None:
    reading = screen_of([("a", 1.0), ("b c d e", 3.0), ("f g h i", 5.0)], tokens=9)
    assert reading.first_token_s == 1.0
    assert list(reading.token_gaps()) == [(0.5, 4), (0.5, 4)]


def test_one_token_a_chunk_needs_no_usage() -> None:
    assert list(screen_of([("a", 1.0), ("b", 1.5)], None).token_gaps()) == [(0.5, 1)]


def test_stream_error_is_raised() -> None:
    screen = Screen(Reading(intended=0, started=0), QUESTION, Patience(), random.Random(0))
    with pytest.raises(ValueError, match="engine_lost"):
        screen.line('data: {"error": {"message": "gone", "code": "engine_lost"}}', 0.0)


@given(st.lists(st.floats(0, 1000, allow_nan=False), min_size=1), st.floats(0, 1))
def test_quantiles_stay_within_the_data(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    quantile = histogram.quantile(share)
    assert quantile is not None
    assert min(values) <= quantile <= max(values)
    exact = sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
    assert quantile == pytest.approx(exact, rel=0.0101, abs=1e-6)


@given(st.lists(st.lists(st.floats(0, 1000, allow_nan=False)), min_size=1, max_size=5))
def test_merged_histograms_are_the_histogram_of_everything(parts: list[list[float]]) -> None:
    merged, whole = Histogram(), Histogram()
    for part in parts:
        one = Histogram()
        for value in part:
            one.record(value)
            whole.record(value)
        merged.merge(one)
    assert merged.buckets == whole.buckets
    assert merged.summary() == pytest.approx(whole.summary(), nan_ok=True)
    assert (merged.minimum, merged.shares()) == (whole.minimum, whole.shares())


def test_empty_histogram_says_none_and_merging_adds_up() -> None:
    empty, full = Histogram(), Histogram()
    assert empty.summary()["p99"] is None
    full.record(2.0, times=3)
    empty.merge(full)
    assert (empty.count, empty.quantile(0.5)) == (3, pytest.approx(2.0, rel=0.02))


ODD = [
    "[1]",
    '"x"',
    '{"choices": [5]}',
    '{"choices": [{"delta": {"content": ["a"]}}]}',
    '{"choices": [], "usage": [1]}',
    '{"choices": [], "usage": {"completion_tokens": 1e999}}',
    '{"choices": [], "usage": {"completion_tokens": -1}}',
    '{"choices": [{"delta": {"content": "\\ud800"}}]}',
    '{"error": "boom"}',
    '{"error": {"code": ["x"]}}',
    '{"id": 5, "choices": []}',
    "[" * 100_000,
]


@pytest.mark.parametrize("data", ODD)
def test_whatever_is_no_event_of_a_completion_is_an_error_in_words(data: str) -> None:
    screen = Screen(Reading(intended=0.0, started=0.0), "", Patience(), random.Random(0))
    with pytest.raises(ValueError, match=r"stream"):
        screen.line(f"data: {data}", 0.0)


def test_an_event_may_lack_what_others_have() -> None:
    screen = Screen(Reading(intended=0.0, started=0.0), "", Patience(), random.Random(0))
    screen.line('data: {"choices": null, "usage": null}', 0.0)
    screen.line('data: {"choices": [{"delta": null, "text": "a"}]}', 0.1)
    screen.line('data: {"usage": {"completion_tokens": 3, "prompt_tokens": null}}', 0.2)
    assert (screen.reading.text, screen.reading.tokens, screen.reading.prompt_tokens) == ("a", 3, 0)
