from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from scipy import stats

from chaos.load.arrivals import Arrival, TraceError, bursts, poisson, replay, within
from chaos.load.questions import TOKENS_PER_WORD, sized
from chaos.load.readers import Question


def test_gaps_are_exponential_and_independent_and_fixed_by_the_seed() -> None:
    times = [a.at_s for a in itertools.islice(poisson(50.0, random.Random(1)), 4000)]
    assert times == [a.at_s for a in itertools.islice(poisson(50.0, random.Random(1)), 4000)]
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert stats.kstest(gaps, "expon", args=(0, 1 / 50)).pvalue > 0.01
    assert stats.kstest(gaps, "expon", args=(0, 1 / 40)).pvalue < 1e-6  # the test can tell
    assert abs(stats.pearsonr(gaps[1:], gaps[:-1]).statistic) < 0.05


def test_bursts_have_their_own_rate_and_stay_poisson_within() -> None:
    arrivals = within(bursts(10.0, 100.0, 5.0, 30.0, random.Random(2)), 3000.0, 10**6)
    places = [arrival.at_s % 30.0 for arrival in arrivals]
    quiet, busy = sum(place < 25 for place in places), sum(place >= 25 for place in places)
    assert quiet == pytest.approx(25_000, abs=4 * 25_000**0.5)
    assert busy == pytest.approx(50_000, abs=4 * 50_000**0.5)
    assert stats.kstest([place - 25 for place in places if place >= 25], "uniform", args=(0, 5)).pvalue > 0.01
    with pytest.raises(ValueError, match="does not fit"):
        next(bursts(1.0, 2.0, 30.0, 30.0, random.Random(0)))


def test_a_run_is_bounded_in_time_and_count() -> None:
    assert [a.at_s for a in within([Arrival(0.5), Arrival(0.9), Arrival(1.0)], 1.0, 9)] == [0.5, 0.9]
    assert len(list(within(poisson(10.0, random.Random(0)), 1e9, 7))) == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("arrival_s,prompt_tokens,output_tokens\n5,10,3\n6.5,20,\n", [(0, 10, 3), (1.5, 20, None)]),
        ("arrival_s\n1\n1\n", [(0, None, None), (0, None, None)]),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,110,27\n",
            [(0, 4808, 10), (0.052, 110, 27)],
        ),
        (
            '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46]}\n\n'
            '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": []}\n',
            [(0, 6955, 52), (3.053, 6472, 26)],
        ),
    ],
    ids=["own", "times only", "Azure", "Mooncake"],
)
def test_traces_are_replayed(
    text: str, expected: list[tuple[float, int | None, int | None]], tmp_path: Path
) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    found = [(a.at_s, a.prompt_tokens, a.output_tokens) for a in replay(file)]
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], abs=1e-5)
    assert [row[1:] for row in found] == [row[1:] for row in expected]
    assert [a.at_s for a in replay(file, 2.0)] == pytest.approx([row[0] / 2 for row in expected], abs=1e-5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no arrivals"),
        ("arrival_s\n", "holds no arrivals"),
        ("when\n3\n", "line 2: no arrival_s; a trace has"),
        ("arrival_s\nsoon\n", "line 2: arrival_s is 'soon', neither"),
        ("arrival_s\nnan\n", "line 2: arrival_s is nan"),
        ("arrival_s\n2\n1\n", "line 3: arrives before"),
        ("arrival_s,prompt_tokens\n2,-4\n", "line 2: prompt_tokens is '-4', not a number of tokens"),
        ('{"arrival_s": 1}\n{"arrival_s"\n', "line 2: not JSON"),
        ('{"arrival_s": 1}\n7\n', "line 2: not an object"),
        ('{"arrival_s": [1]}\n', "line 1: arrival_s is"),
        (
            '{"arrival_s": 1, "prompt_tokens": 1e999}\n',
            "line 1: prompt_tokens is inf, not a number of tokens",
        ),
        ("arrival_s,prompt_tokens\n2,99999999999\n", "line 2: prompt_tokens is '99999999999', not a number"),
        (f"arrival_s\n{'1' * 200_000}\n", "cannot read the trace .*: field larger than"),
        ('{"a":' + "[" * 100_000, "cannot read the trace .*: maximum recursion"),
    ],
)
def test_a_bad_trace_says_where_and_what(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(TraceError, match=complaint):
        list(replay(file))


def test_a_trace_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        replay(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        list(replay(tmp_path / "binary"))


def test_a_trace_is_read_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text("arrival_s\n" + "".join(f"{n}\n" for n in range(50_000)) + "broken\n")
    assert len(list(itertools.islice(replay(file), 100))) == 100


def test_questions_take_the_lengths_of_a_trace() -> None:
    question = Question(messages=({"role": "user", "content": "one two three"},), max_tokens=9)
    assert sized(question, None, None) is question
    long = sized(question, 1450, 77)
    assert len(long.text.split()) == pytest.approx(1450 / TOKENS_PER_WORD, abs=1)
    assert long.body("m") | {"max_tokens": 77, "ignore_eos": True} == long.body("m")
    assert json.loads(json.dumps(long.body("m")))["ignore_eos"] is True
