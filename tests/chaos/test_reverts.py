"""Verified reverts: the canary before faults, after the last of them, and what is said of each."""

import asyncio
import copy

import pytest

from chaos.canary import LOGPROB_ERROR, QUESTION, Answer, Canary
from chaos.service import Chaos
from chaos.settings import ChaosSettings
from tests.chaos.lab import NOISE, TRUNCATION, Process, eventually, start, story


def answer_of(*pairs):
    tokens = [
        {"token": text, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": []}
        for text, logprob in pairs
    ]
    return {"choices": [{"logprobs": {"content": tokens}}]}


CLEAN = answer_of((" one", -0.1), (" two", -0.2))


class Asked:
    """The way to the server: counts questions and returns what the test set, or raises it."""

    def __init__(self):
        self.answer = CLEAN
        self.times = 0
        self.in_force = []
        self.chaos = None

    async def __call__(self, body):
        assert body is QUESTION
        self.times += 1
        self.in_force.append(self.chaos.model.hook.fault_ids() + self.chaos.prompt_hook.fault_ids())
        await asyncio.sleep(0.02)
        if isinstance(self.answer, Exception):
            raise self.answer
        return copy.deepcopy(self.answer)


@pytest.fixture
async def chaos(tmp_path, monkeypatch):
    monkeypatch.setattr("chaos.controller.CONFIRM_S", 0.2)
    asked, path = Asked(), tmp_path / "journal.jsonl"
    service = Chaos(ChaosSettings(chaos=True), Process(), path, ask=asked, exact=True)
    service.asked, service.path, service.model = asked, path, service.controller._model
    asked.chaos = service
    await service.start()
    yield service
    await service.stop()


async def verdicts(chaos):
    """Wait until every fault that ended has its verdict; return them by kind."""
    status = chaos.controller.status
    await eventually(lambda: all(f["reverted"]["state"] != "pending" for f in status()["ended"]))
    await chaos.controller.note("settled")
    told = {e["kind"]: e for e in story(chaos.path, without=()) if e["event"] == "revert"}
    for fault in chaos.controller.status()["ended"]:
        assert told[fault["kind"]]["state"] == fault["reverted"]["state"]
    return {fault["kind"]: fault["reverted"] for fault in chaos.controller.status()["ended"]}


async def test_the_same_answer_verifies_and_is_asked_for_while_nothing_is_in_force(chaos):
    noise = await start(chaos, NOISE)
    await chaos.controller.end(noise["fault_id"])
    assert await verdicts(chaos) == {"noise": {"state": "verified", "error": 0.0}}
    assert chaos.asked.in_force == [[], []]


async def test_another_answer_is_told(chaos):
    noise = await start(chaos, NOISE)
    chaos.asked.answer = answer_of((" one", -0.1), (" too", -0.2))
    await chaos.controller.end(noise["fault_id"])
    verdict = (await verdicts(chaos))["noise"]
    assert verdict["state"] == "differs"
    assert verdict["why"] == "' one two' became ' one too'"


async def test_overlapping_faults_are_verified_when_the_last_has_ended(chaos):
    noise = await start(chaos, NOISE)
    truncation = await start(chaos, TRUNCATION)
    assert chaos.asked.times == 1
    await chaos.controller.end(noise["fault_id"])
    await asyncio.sleep(0.1)
    (ended,) = chaos.controller.status()["ended"]
    assert ended["reverted"]["state"] == "pending"
    await chaos.controller.end(truncation["fault_id"])
    found = await verdicts(chaos)
    assert {kind: verdict["state"] for kind, verdict in found.items()} == {
        "noise": "verified",
        "truncation": "verified",
    }
    assert chaos.asked.in_force == [[], []]


async def test_a_start_waits_for_the_canary_so_that_no_fault_strikes_it(chaos):
    noise = await start(chaos, NOISE)
    ending = asyncio.create_task(chaos.controller.end(noise["fault_id"]))
    await asyncio.gather(ending, *(start(chaos, base) for base in (NOISE, TRUNCATION)))
    await chaos.controller.halt()
    await verdicts(chaos)
    assert chaos.asked.in_force and not any(chaos.asked.in_force)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_without_an_answer_nothing_is_claimed(chaos, when):
    failure = RuntimeError("the server is full")
    if when == "before":
        chaos.asked.answer = failure
    noise = await start(chaos, NOISE)
    chaos.asked.answer = CLEAN if when == "before" else failure
    await chaos.controller.end(noise["fault_id"])
    verdict = (await verdicts(chaos))["noise"]
    assert verdict == {
        "state": "not checked",
        "why": f"{when} the fault the canary had no answer: the server is full",
    }


async def test_expired_and_halted_faults_are_verified_too(chaos):
    await start(chaos, NOISE, ttl_s=0.1)
    await eventually(lambda: not chaos.controller.in_force)
    assert (await verdicts(chaos))["noise"]["state"] == "verified"
    await start(chaos, TRUNCATION)
    await chaos.controller.halt()
    assert (await verdicts(chaos))["truncation"]["state"] == "verified"


async def test_a_canary_that_hangs_holds_up_nothing_for_long(chaos, monkeypatch):
    async def hang(body):
        await asyncio.sleep(3600)

    chaos.controller.reverts._canary = Canary(hang, exact=True, timeout_s=0.1)
    noise = await start(chaos, NOISE)
    await asyncio.wait_for(chaos.controller.end(noise["fault_id"]), 1)
    assert "no answer within 0.1 s" in (await verdicts(chaos))["noise"]["why"]


def tokens_of(*pairs):
    return Answer(answer_of(*pairs)["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize(
    ("exact", "moved", "state"),
    [
        (True, 0.0, "verified"),
        (True, 1e-9, "differs"),
        (False, 0.9 * LOGPROB_ERROR, "verified"),
        (False, 1.1 * LOGPROB_ERROR, "differs"),
        (False, float("nan"), "differs"),
    ],
)
def test_how_near_an_answer_must_be(exact, moved, state):
    canary = Canary(None, exact=exact)
    before, after = tokens_of(("a", -1.0), ("b", -2.0)), tokens_of(("a", -1.0), ("b", -2.0 + moved))
    assert canary.compare(before, after).state == state


@pytest.mark.parametrize("exact", [True, False])
def test_fewer_tokens_are_another_answer(exact):
    canary = Canary(None, exact=exact)
    assert canary.compare(tokens_of(("a", -1.0), ("b", -2.0)), tokens_of(("a", -1.0))).state == "differs"
