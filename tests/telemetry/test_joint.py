from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.joint import Joint, Running

from .conftest import START


def one(value: int | float) -> np.ndarray:
    return np.array([value])


def test_mean_confidence_covers_one_tenth_of_a_second() -> None:
    joint = Joint(2, Running())
    joint.advance(START)
    joint.add_tokens(np.array([0, 1, 1]), np.array([0.2, 0.6, np.nan]))
    joint.advance(START + 0.05)
    assert joint.read("mean_confidence", START + 0.05).value is None
    joint.advance(START + 0.1)
    assert joint.read("mean_confidence", START + 0.1).value == pytest.approx(0.4)
    assert joint.read("mean_confidence", START + 0.1, 1).value == pytest.approx(0.6)
    joint.add_tokens(one(0), one(0.9))
    joint.advance(START + 0.2)
    assert joint.read("mean_confidence", START + 0.2).value == pytest.approx(0.9)


def test_response_entropy_is_a_mean_over_responses_not_over_tokens() -> None:
    running = Running(1)
    joint = Joint(1, running)
    joint.advance(START)
    long, short = running.take(0, "a"), running.take(0, "b")
    for value in (1.0, 1.0, 4.0):
        running.add(one(long), one(value))
    running.add(one(short), one(6.0))
    running.add(one(short), one(float("nan")))
    joint.advance(START + 0.4)
    assert joint.read("response_entropy", START + 0.4).value is None
    joint.advance(START + 0.5)
    assert joint.read("response_entropy", START + 0.5).value == pytest.approx((2.0 + 6.0) / 2)
    running.give_back(short)
    joint.advance(START + 1.0)
    assert joint.read("response_entropy", START + 1.0).value == pytest.approx(2.0)


def test_interruption_rate_slides_over_the_window() -> None:
    joint = Joint(1, Running(), window_s=3)
    joint.advance(START)
    joint.add_ending(START + 0.2, 0, True)
    joint.add_ending(START + 0.4, 0, False)
    joint.advance(START + 0.9)
    assert joint.read("interruption_rate", START + 0.9).value is None
    joint.advance(START + 1)
    assert joint.read("interruption_rate", START + 1).value == pytest.approx(0.5)
    joint.add_ending(START + 2, 0, False)
    joint.advance(START + 4)
    assert joint.read("interruption_rate", START + 4).value == 0


def test_no_news_is_blind_and_keeps_its_age() -> None:
    joint = Joint(1, Running(), blind_after_s=2)
    assert joint.read("mean_confidence", START) == (None, None, None, True)
    joint.add_tokens(one(0), one(0.7))
    joint.advance(START)
    joint.advance(START + 10)
    reading = joint.read("mean_confidence", START + 10)
    assert (reading.value, reading.time, reading.age_s, reading.blind) == (0.7, START, 10, True)
    assert not joint.read("mean_confidence", START + 2).blind


@given(st.lists(st.tuples(st.floats(0.001, 0.7), st.booleans()), min_size=1, max_size=40))
def test_interruption_rate_matches_counting(endings: list[tuple[float, bool]]) -> None:
    joint = Joint(1, Running(), window_s=2)
    joint.advance(START)
    time, seen = START, []
    for gap, broken in endings:
        for boundary in np.arange(np.floor(time) + 1, np.floor(time + gap) + 1):
            joint.advance(float(boundary))
        time += gap
        joint.add_ending(time, 0, broken)
        seen.append((time, broken))
    boundary = float(np.floor(time) + 1)
    joint.advance(boundary)
    window = [broken for at, broken in seen if at > boundary - 2]
    assert joint.read("interruption_rate", boundary).value == pytest.approx(np.mean(window))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=300))
def test_rows_are_never_shared(steps: list[tuple[bool, int]]) -> None:
    running, taken = Running(2), []
    for take, pick in steps:
        if take or not taken:
            row = running.take(0, "t")
            assert row not in taken
            assert running.tokens[row] == 0
            running.add(one(row), one(1.0))
            taken.append(row)
        else:
            running.give_back(taken.pop(pick % len(taken)))
    assert int(running.tokens.sum()) == len(taken)
