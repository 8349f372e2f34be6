from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from chaos.load.readers import Question, Readers, closed_loop, open_loop
from chaos.load.reading import Patience, now
from chaos.load.report import Report

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


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "outcome", "retry_after_s"),
    [
        (STREAM + b"data: [1]\n\ndata: [DONE]\n\n", "failed", None),
        (STREAM + b"data: " + b"[" * 100_000 + b"\n\n", "failed", None),
        (STREAM + b'data: {"error": {"code": "\\ud800"}}\n\n', "failed", None),
        (b"HTTP/1.1 429 x\r\nretry-after: nan\r\ncontent-length: 0\r\n\r\n", "shed", 1.0),
        (b"HTTP/1.1 503 x\r\nretry-after: -5\r\ncontent-length: 2\r\n\r\n[]", "shed", 1.0),
        (b'HTTP/1.1 500 x\r\ncontent-length: 28\r\n\r\n{"error": {"code":"\\ud800a"}}', "failed", 1.0),
        (b"HTTP/1.1 302 x\r\nlocation: http://[::\r\ncontent-length: 0\r\n\r\n", "failed", None),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\nxxxxx", "failed", None),
        (b"garbage\r\n\r\n", "failed", None),
        (b"", "failed", None),
    ],
)
async def test_whatever_a_server_answers_is_counted_and_can_be_written(
    script: Any, raw: bytes, outcome: str, retry_after_s: float | None
) -> None:
    script.raw = raw
    async with crowd(script) as readers:
        ((_, reading),) = [one async for one in open_loop(readers, [(ASK, now())], lambda: False)]
    assert (reading.outcome, reading.retry_after_s) == (outcome, retry_after_s)
    assert reading.error is not None and reading.error.encode()


async def test_nobody_listening_is_a_failure_not_an_exception() -> None:
    async with Readers("http://127.0.0.1:9", "k") as readers:
        assert (await readers.read(ASK)).outcome == "failed"


async def test_open_loop_does_not_wait_for_answers(script: Any) -> None:
    script.before_s = 0.5
    began = now()
    due = [(ASK, began + at / 50) for at in range(10)]
    async with crowd(script) as readers:
        readings = [reading async for _, reading in open_loop(readers, due, lambda: False)]
    assert [r.intended for r in sorted(readings, key=lambda r: r.intended)] == [at for _, at in due]
    assert all(r.outcome == "read" and r.start_delay_s >= 0 for r in readings)
    starts = [reading.started for reading in readings]
    assert (
        max(starts) < began + 0.5
    )  # before the first answer ends: a loop that waits would need five seconds


async def test_a_full_house_sends_late_and_says_so(script: Any) -> None:
    script.before_s = 0.1
    due = [(ASK, now())] * 3
    async with crowd(script) as readers:
        readings = [reading async for _, reading in open_loop(readers, due, lambda: False, at_once=1)]
    delays = sorted(reading.start_delay_s for reading in readings)
    assert delays[1] >= 0.1 and delays[2] >= 0.2
    assert max(r.first_token_due_s or 0 for r in readings) >= 0.3


async def test_hanging_up_ends_what_runs_and_sends_no_more(script: Any) -> None:
    script.chunks, script.gap_s = ["word "] * 100, 0.05
    due = [(ASK, now()), (ASK, now()), (ASK, now() + 0.3)]
    async with crowd(script, median_s=60.0) as readers:
        asyncio.get_running_loop().call_later(0.2, readers.hang_up)
        readings = [reading async for _, reading in open_loop(readers, due, lambda: False)]
    assert [reading.outcome for reading in readings] == ["ended"] * 3
    assert script.served == 2
    assert sorted(bool(reading.text) for reading in readings) == [False, True, True]


async def test_a_stall_shows_in_the_tail_of_an_open_loop_and_hides_in_a_closed_one(script: Any) -> None:
    script.chunks, script.gap_s = ["yes "], 0.0
    began = now()
    script.stall = (began + 0.5, began + 1.5)
    due = [(ASK, began + at / 40) for at in range(80)]  # two seconds, half of them stalled
    async with crowd(script) as readers:
        opened = [reading async for _, reading in open_loop(readers, due, lambda: False)]
    assert len(opened) == 80
    for reading in opened:  # who was due in the stall waited for its end, whatever the machine's pace
        if script.stall[0] <= reading.intended < script.stall[1]:
            assert (reading.first_token_due_s or 0) >= script.stall[1] - reading.intended - 0.01
    report = Report()
    report.extend(opened)
    assert (report.times["first_token_s"].quantile(0.9) or 0) >= 0.75  # 0.8 by the schedule

    began = now()
    script.stall = (began + 0.5, began + 1.5)
    async with crowd(script) as readers:
        flow = closed_loop(readers, itertools.repeat(ASK), 1, lambda: now() > began + 2)
        closed = [reading async for _, reading in flow]
    waited = [reading for reading in closed if (reading.first_token_due_s or 0) > 0.5]
    assert len(waited) <= 1 < sum((reading.first_token_due_s or 0) > 0.5 for reading in opened)


async def test_closed_loop_keeps_its_streams_busy_and_stops(script: Any) -> None:
    questions = itertools.repeat(ASK, 12)
    async with crowd(script) as readers:
        readings = [r async for _, r in closed_loop(readers, questions, 4, lambda: False)]
    assert len(readings) == 12
