from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any

import pytest

from chaos.load.readers import Question, Readers, arrivals, closed_loop, open_loop
from chaos.load.reading import Patience

ASK = Question(messages=({"role": "user", "content": "What is the capital of France?"},), max_tokens=8)


def crowd(script: Any, **patience: float) -> Readers:
    return Readers(script.url, "k", patience=Patience(**{"sigma": 0.0, "reaction_sigma": 0.0, **patience}))


async def test_answer_is_read_to_its_end(script: Any) -> None:
    script.before_s = 0.1
    async with crowd(script) as readers:
        reading = await readers.read(ASK)
    assert (reading.outcome, reading.text, reading.tokens) == ("read", "The capital is Paris.", 4)
    assert (reading.request_id, reading.finish_reason) == ("r1", "stop")
    assert len(reading.gaps) == 3
    assert reading.first_token_s is not None and reading.first_token_s >= 0.1  # not the role-only chunk


async def test_impatient_reader_closes_the_socket_in_mid_stream(script: Any) -> None:
    script.chunks = ["the "] * 200
    script.gap_s = 0.02
    async with crowd(script, median_s=0.2, reaction_s=9.0) as readers:
        reading = await readers.read(ASK)
    assert reading.outcome == "left"
    assert reading.duration_s > 0.19  # patience; the whole answer takes four seconds
    deadline = time.monotonic() + 3
    while not script.hung_up and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert script.hung_up == 1


async def test_patience_also_ends_before_the_first_token(script: Any) -> None:
    script.before_s = 0.5
    async with crowd(script, median_s=0.05) as readers:
        reading = await readers.read(ASK)
    assert (reading.outcome, reading.left, reading.first_token_s) == ("left", "impatient", None)


async def test_unreadable_text_shortens_patience(script: Any) -> None:
    script.chunks = [
        f"{word} "
        for word in ["zxq", "Ölfen", "grabTion", "parlour", "%%", "mitos", "quibbl", "xxvij", "onda", "velt"]
    ] * 20
    async with crowd(script, median_s=30.0, reaction_s=0.05) as readers:
        reading = await readers.read(ASK)
    assert (reading.outcome, reading.left) == ("left", "unreadable")


async def test_refusals_and_cut_streams_stay_apart(script: Any) -> None:
    async with crowd(script) as readers:
        script.status = 503
        shed = await readers.read(ASK)
        script.status = 400
        failed = await readers.read(ASK)
        script.status, script.cut = 200, True
        cut = await readers.read(ASK)
    assert (shed.outcome, shed.error, shed.retry_after_s) == ("shed", "503 breaker_open", 0.05)
    assert (failed.outcome, failed.error) == ("failed", "400 breaker_open")
    assert cut.outcome == "failed" and "before [DONE]" in str(cut.error)


async def test_nobody_listening_is_a_failure_not_an_exception() -> None:
    async with Readers("http://127.0.0.1:9", "k") as readers:
        assert (await readers.read(ASK)).outcome == "failed"


def test_arrivals_are_poisson_and_fixed_by_the_seed() -> None:
    first = list(itertools.islice(arrivals(50.0, random.Random(1), 100.0), 2000))
    assert first == list(itertools.islice(arrivals(50.0, random.Random(1), 100.0), 2000))
    assert (first[-1] - 100.0) / 2000 == pytest.approx(1 / 50, rel=0.1)


async def test_open_loop_reports_the_delay_from_the_intended_start(script: Any) -> None:
    script.gap_s = 0.03
    end = time.time() + 0.6
    async with crowd(script) as readers:
        flow = open_loop(readers, itertools.repeat(ASK), 40.0, lambda: time.time() > end, seed=3)
        readings = [reading async for _, reading in flow]
    assert len(readings) > 8  # answers take 0.12 s: a closed loop of one would reach 5
    assert all(r.outcome == "read" for r in readings)
    assert all(r.start_delay_s >= 0 for r in readings)


async def test_closed_loop_keeps_its_streams_busy_and_stops(script: Any) -> None:
    questions = itertools.repeat(ASK, 12)
    async with crowd(script) as readers:
        readings = [r async for _, r in closed_loop(readers, questions, 4, lambda: False)]
    assert len(readings) == 12
