"""The controller: refusals, journal, endings."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from chaos.contract import ChaosError
from chaos.journal import Journal, JournalError
from chaos.service import Chaos
from chaos.settings import ChaosSettings
from engine.messages import EngineStats, RequestMeta, StepOutput
from tests.chaos.lab import AUTHORITY, NOISE, TRUNCATION, Process, refused, start, story


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "journal.jsonl"


@pytest.fixture
async def chaos(path, monkeypatch):
    monkeypatch.setattr("chaos.controller.CONFIRM_S", 0.2)
    service = Chaos(ChaosSettings(chaos=True, chaos_max_faults=3), Process(), path)
    service.model = service.controller._model
    await service.start()
    yield service
    await service.stop()


async def test_start_list_touch_end(chaos, path):
    listing = await start(chaos, NOISE, seed=5)
    fault_id = listing["fault_id"]
    assert listing["state"] == "active"
    assert 29 < listing["remaining_s"] <= 30
    assert chaos.model.hook.fault_ids() == [fault_id]
    stats = EngineStats(running=1, waiting=0, pages_used=1, pages_total=2)
    for _ in range(2):
        touched = {"r1": [fault_id], "r2": [fault_id]}
        chaos.on_step(
            StepOutput(step=0, time=0.0, duration_s=0.0, prefill_tokens=0, touched=touched, stats=stats)
        )
    assert chaos.controller.status()["faults"][0]["touched"] == 2
    assert (await chaos.controller.end(fault_id))["ended"]
    for over, known in ((fault_id, True), ("never-was", False)):
        again = await chaos.controller.end(over)
        assert (again["ended"], again["known"]) == (False, known)
    assert chaos.model.hook.fault_ids() == []
    events = story(path)
    assert [entry["event"] for entry in events] == ["start", "end"]
    assert events[0]["params"] == {"sigma": 2.0, "from_token": 0}
    assert events[1] | {"time": 0} == events[1] | {"time": 0, "touched": 2, "reason": "stopped"}


async def test_a_fault_on_pages_is_a_lease_like_the_others(chaos, path):
    flip = {"kind": "kv_flip", "ttl_s": 30.0, "params": {"burst": 4, "bit": "any"}}
    listing = await start(chaos, flip, selector={"tenant": "gold"})
    assert chaos.model.hook.on_pages and not chaos.model.hook.on_logits
    await refused(chaos, flip, "overlap", selector={"route": "qa"})
    await refused(chaos, flip, "invalid_fault", selector={"tenant": "silver"}, params={"burst": 17})
    await start(chaos, NOISE, ttl_s=0.1)
    assert chaos.model.hook.on_logits
    await asyncio.sleep(0.6)
    assert chaos.model.hook.on_pages and not chaos.model.hook.on_logits
    assert (await chaos.controller.halt())["ended"] == [listing["fault_id"]]
    assert not chaos.model.hook.active and not chaos.model.hook.on_pages
    assert story(path)[0]["params"] == {
        "from_token": 1,
        "burst": 4,
        "bit": "any",
        "where": "both",
        "rate": 0.0,
    }


async def test_prompt_faults_count_what_they_changed(chaos):
    await start(chaos, TRUNCATION)
    messages = [{"role": "user", "content": "Bo is old. Cy is new. Di is tall.\n\nWho is old?"}]
    for name in ("a", "b"):
        changed, touched = chaos.prompt_hook.apply(RequestMeta(request_id=name), messages)
        assert changed != messages
        assert len(touched) == 1
    assert chaos.controller.status()["faults"][0]["touched"] == 2


async def test_the_switch_the_caps_and_the_numbers(path):
    async def service(**settings):
        return Chaos(ChaosSettings(**settings), Process(), path.with_name(f"{len(settings)}.jsonl"))

    off = await service()
    assert "QUAVER_CHAOS" in await refused(off, NOISE, "chaos_disabled")
    await off.stop()
    capped = await service(
        chaos=True, chaos_max_ttl_s=60.0, chaos_max_share=0.5, chaos_caps={"noise.sigma": 3.0}
    )
    share = {"share": 0.4}
    await refused(capped, NOISE, "over_cap", ttl_s=61.0, selector=share)
    await refused(capped, NOISE, "over_cap", ttl_s=0.0, selector=share)
    await refused(capped, NOISE, "over_cap", ttl_s=float("nan"), selector=share)
    await refused(capped, NOISE, "over_cap", selector={})
    await refused(capped, NOISE, "over_cap", selector=share, params={"sigma": 3.5})
    await refused(capped, NOISE, "invalid_fault", params={"sigma": "much"})
    await refused(capped, NOISE, "invalid_fault", selector={"share": 7.0})
    assert "truncation" in await refused(capped, NOISE, "invalid_fault", kind="typo")
    assert capped.controller.status()["faults"] == []
    await start(capped, NOISE, selector=share)
    await capped.stop()


async def test_same_kind_may_not_overlap_and_different_kinds_compose_in_both_orders(chaos):
    for first, second in ((NOISE, TRUNCATION), (TRUNCATION, NOISE)):
        one = await start(chaos, first, selector={"tenant": "gold"})
        message = await refused(chaos, first, "overlap", selector={"route": "qa"})
        assert one["fault_id"] in message
        await start(chaos, first, selector={"tenant": "silver"})
        await start(chaos, second)
        await refused(chaos, second, "too_many_faults", selector={"tenant": "gold"})
        for fault in chaos.controller.status()["faults"]:
            await chaos.controller.end(fault["fault_id"])


async def test_two_starts_at_once_do_not_slip_past_each_other(chaos):
    results = await asyncio.gather(start(chaos, NOISE), start(chaos, NOISE), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["ChaosError", "dict"]


async def test_a_fault_ends_by_itself_and_the_journal_says_so(chaos, path):
    await start(chaos, NOISE, ttl_s=0.1)
    await start(chaos, TRUNCATION, ttl_s=0.1)
    await asyncio.sleep(0.6)
    assert chaos.controller.status()["faults"] == []
    assert chaos.model.hook.fault_ids() == []
    assert not chaos.prompt_hook.active
    await chaos.controller.unblock()
    assert [entry["reason"] for entry in story(path) if entry["event"] == "end"] == ["expired", "expired"]


async def test_a_lost_model_process_is_noticed_and_nothing_is_attached_again(chaos, path):
    await start(chaos, NOISE)
    prompt = await start(chaos, TRUNCATION)
    chaos.model.die()
    chaos.on_engine("lost")
    chaos.on_engine("ready")
    await asyncio.sleep(0.3)
    assert [fault["fault_id"] for fault in chaos.controller.status()["faults"]] == [prompt["fault_id"]]
    assert chaos.model.hook.fault_ids() == []
    ends = [entry for entry in story(path) if entry["event"] == "end"]
    assert [(entry["kind"], entry["reason"]) for entry in ends] == [("noise", "model process lost")]


async def test_halt_stops_everything_blocks_and_survives_a_restart(chaos, path):
    await start(chaos, NOISE)
    await start(chaos, TRUNCATION)
    answer = await chaos.controller.halt()
    assert len(answer["ended"]) == 2
    assert not chaos.prompt_hook.active
    assert not chaos.model.hook.active
    await refused(chaos, NOISE, "chaos_halted")
    await chaos.stop()
    again = Chaos(ChaosSettings(chaos=True), Process(), path)
    assert again.controller.status()["lever"]["blocked"]
    await refused(again, NOISE, "chaos_halted")
    await again.controller.unblock()
    await start(again, NOISE)
    await again.stop()
    assert story(path)[-1]["reason"] == "server stopped"


async def test_a_hung_model_process_blocks_neither_halt_nor_end(chaos, path):
    noise = await start(chaos, NOISE, selector={"tenant": "a"})
    await start(chaos, NOISE, selector={"tenant": "b"})
    chaos.model.hung = True
    ended = await asyncio.wait_for(chaos.controller.end(noise["fault_id"]), 2)
    told = {"ended": True, "known": True, "confirmed": False, "touched": 0}
    assert ended == {"fault_id": noise["fault_id"], **told}
    halted = await asyncio.wait_for(chaos.controller.halt(), 2)
    assert not halted["confirmed"]
    assert [entry["event"] for entry in story(path)] == ["start", "start", "end", "halt", "end"]


async def test_a_fault_that_cannot_be_sent_is_not_left_on_the_list(chaos, path, monkeypatch):
    async def fail(fault):
        raise OverflowError("no such number")

    with monkeypatch.context() as patch:
        patch.setattr(chaos.model, "attach_fault", fail)
        await refused(chaos, NOISE, "model_unavailable")
    assert chaos.controller.status()["faults"] == []
    assert (await start(chaos, NOISE))["state"] == "active"


async def test_a_halt_in_the_middle_of_a_start_wins(chaos):
    chaos.model.hung = True
    starting = asyncio.create_task(start(chaos, NOISE))
    await asyncio.sleep(0.1)
    assert chaos.controller.status()["faults"][0]["state"] == "starting"
    await chaos.controller.halt()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    chaos.model.hung = False
    assert chaos.controller.status()["faults"] == []
    assert not chaos.model.hook.active


async def test_a_full_disk_refuses_starts_and_lets_everything_end(chaos):
    noise = await start(chaos, NOISE)
    await start(chaos, TRUNCATION)
    full = os.open("/dev/full", os.O_WRONLY)
    real, chaos.controller._scribe.journal._file = chaos.controller._scribe.journal._file, full
    assert "No space left" in await refused(chaos, AUTHORITY, "journal_unavailable")
    assert len(chaos.controller.status()["faults"]) == 2
    assert (await chaos.controller.end(noise["fault_id"]))["ended"]
    assert (await chaos.controller.halt())["blocked"]
    assert not chaos.prompt_hook.active
    assert not chaos.model.hook.active
    told = chaos.controller.status()["journal"]
    told = [entry for entry in told if entry["event"] != "revert"]
    assert [entry["event"] for entry in told][:2] == ["end", "halt"]
    assert all("unwritten" in entry for entry in told[:2])
    chaos.controller._scribe.journal._file = real
    os.close(full)


async def test_preview_counts_recent_requests(chaos):
    for number in range(10):
        chaos._admission.seen(RequestMeta(request_id=str(number), tenant="gold" if number < 4 else "default"))
    assert chaos.controller.admission.preview({"tenant": "gold", "share": 0.5}) == {
        "recent": 10,
        "admitted": 4,
        "expected": 2.0,
    }
    with pytest.raises(ChaosError):
        chaos.controller.admission.preview({"share": 2.0})


VICTIM = """
    import asyncio, sys
    from pathlib import Path
    from chaos.contract import StartFault
    from chaos.service import Chaos
    from chaos.settings import ChaosSettings

    class Nowhere:
        fault_listeners = []
        async def attach_fault(self, fault): return True
        async def detach_fault(self, fault_id=None): return True

    async def main():
        chaos = Chaos(ChaosSettings(chaos=True), Nowhere(), Path(sys.argv[1]))
        started = await chaos.controller.start(StartFault(kind="noise", ttl_s=600.0))
        print(started["fault_id"], flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


def test_kill_9_leaves_a_journal_that_tells_and_no_fault(path):
    victim = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(VICTIM), str(path)], stdout=subprocess.PIPE
    )
    with victim:
        fault_id = victim.stdout.readline().decode().strip()
        assert story(path)[0]["fault_id"] == fault_id
        with pytest.raises(JournalError, match="QUAVER_STATE_DIR"):
            Journal(path)  # one server at a time
        os.kill(victim.pid, signal.SIGKILL)
    with path.open("ab") as file:
        file.write(b"[" * 50_000 + b"\n" + b'{"event": "sta')  # damaged, and torn in mid-write

    async def restart():
        again = Chaos(ChaosSettings(chaos=True), Process(), path)
        assert again.controller.status()["faults"] == []
        await start(again, NOISE)
        await again.stop()

    asyncio.run(restart())
    lines = path.read_text().splitlines()
    entries = [json.loads(line) for line in lines if line != '{"event": "sta' and line[0] != "["]
    entries = [entry for entry in entries if entry["event"] != "revert"]
    assert [entry["event"] for entry in entries] == ["start", "end", "recovery", "start", "end"]
    assert (entries[1]["fault_id"], entries[1]["reason"]) == (fault_id, "process lost")
    told = {name: entries[2][name] for name in ("lost", "unreadable_lines", "torn_line")}
    assert told == {"lost": [fault_id], "unreadable_lines": 2, "torn_line": True}


async def test_a_journal_that_cannot_be_opened_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="QUAVER_STATE_DIR"):
        Journal(tmp_path / "file" / "journal.jsonl")
