"""The controller under any order of starts, ends, expiry, halts, lost processes and a full disk.

What is in force is listed; it was on the disk before it acted; after a halt nothing is in force; the
canary is asked while nothing is; and whatever is over was told of once.
"""

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from chaos.contract import ChaosError, StartFault
from chaos.service import Chaos
from chaos.settings import ChaosSettings
from chaos.stops import StopWhen
from tests.chaos.lab import AUTHORITY, NOISE, TRUNCATION, Process
from tests.chaos.test_reverts import CLEAN
from tests.chaos.test_stops import NAMES, alert

KINDS = (NOISE, TRUNCATION, AUTHORITY, {"kind": "kv_flip", "ttl_s": 30.0})
CLOCKED = ("controller", "contract", "leases", "prompt_hook", "model_hook")


class Machine(RuleBasedStateMachine):
    faults = Bundle("faults")

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        self.patches = [mock.patch(f"chaos.{name}.time", clock) for name in CLOCKED]
        for patch in self.patches:
            patch.start()
        self.model = Process()
        self.full = os.open("/dev/full", os.O_WRONLY)
        self.asked_in_force = []
        self.firing = False
        self.chaos = self.run(self.build())
        self.disk = self.journal._file

    async def build(self):
        async def ask(body):
            self.asked_in_force += self.in_force()
            await asyncio.sleep(0)
            self.asked_in_force += self.in_force()
            return CLEAN

        path = self.folder / "journal.jsonl"
        chaos = Chaos(
            ChaosSettings(chaos=True), self.model, path, ask=ask, exact=True, alert_names=lambda: NAMES
        )
        for hook in (chaos.prompt_hook, self.model.hook):
            self.watch(hook)
        return chaos

    def watch(self, hook):
        attach = hook.attach

        def attached(message):
            assert message.fault_id in self.on_disk("start"), "it acts before it is on the disk"
            attach(message)

        hook.attach = attached

    @property
    def journal(self):
        return self.chaos.controller._scribe.journal

    def on_disk(self, event):
        lines = (self.folder / "journal.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines if line]  # never half a line
        return [entry.get("fault_id") for entry in entries if entry["event"] == event]

    def run(self, work):
        """Do it, and wait until nothing is under way and the journal's thread has nothing to write."""

        async def whole():
            done = await work
            while hasattr(self, "chaos") and self.chaos.controller._tasks:
                await asyncio.gather(*self.chaos.controller._tasks)
            if hasattr(self, "chaos") and not self.chaos.controller._scribe._closed:
                await self.loop.run_in_executor(self.chaos.controller._scribe._thread, int)
            return done

        return self.loop.run_until_complete(whole())

    def on_loop(self, call, *arguments):
        async def inside():
            call(*arguments)

        self.run(inside())

    def in_force(self):
        hooks = (self.chaos.prompt_hook, self.model.hook)
        return [lease.fault_id for hook in hooks for lease in hook.chain(self.now)]

    def listed(self):
        return [fault["fault_id"] for fault in self.chaos.controller.status()["faults"]]

    @property
    def blocked(self):
        return self.chaos.controller.status()["lever"]["blocked"]

    @rule(
        target=faults,
        base=st.sampled_from(KINDS),
        tenant=st.sampled_from([None, "a", "b"]),
        ttl=st.integers(1, 30),
        stop=st.booleans(),
    )
    def start(self, base, tenant, ttl, stop):
        selector = {} if tenant is None else {"tenant": tenant}
        condition = StopWhen(alert="L2") if stop else StopWhen()
        asked = StartFault(**{**base, "ttl_s": float(ttl)}, selector=selector, stop=condition)
        before = self.listed()
        try:
            listing = self.run(self.chaos.controller.start(asked))
        except ChaosError as error:
            expected = {
                "chaos_halted": self.blocked,
                "stop_condition": stop and self.firing,
                "journal_unavailable": self.journal._file == self.full,
                "too_many_faults": len(before) >= 4,
                "overlap": any(fault_id.startswith(base["kind"]) for fault_id in before),
            }
            assert expected[error.code], error
            assert self.listed() == before
            return multiple()
        assert listing["fault_id"] in self.in_force()
        return listing["fault_id"]

    @rule(fault_id=faults)
    def end(self, fault_id):
        known = fault_id in self.listed()
        assert self.run(self.chaos.controller.end(fault_id))["ended"] is known
        assert fault_id not in self.in_force()

    @rule(seconds=st.floats(0.1, 20), model_first=st.booleans())
    def wait(self, seconds, model_first):
        self.now += seconds
        if model_first and self.model.hook.expire(self.now):
            self.on_loop(self.model._tell)
        self.on_loop(self.chaos.controller.tick)

    @rule()
    def halt(self):
        self.run(self.chaos.controller.halt())
        assert self.blocked and not self.in_force()

    @rule()
    def unblock(self):
        self.run(self.chaos.controller.unblock())

    @rule(firing=st.booleans())
    def sound_the_alarm(self, firing):
        watched = any(fault["stop"] for fault in self.chaos.controller.status()["faults"])
        self.firing = firing
        self.on_loop(self.chaos.on_alert, alert(state="firing" if firing else "resolved"))
        if firing and watched:
            assert self.blocked and not self.in_force() and not self.listed()

    @rule()
    def lose_the_model(self):
        self.on_loop(self.model.die)
        assert not self.model.hook.active

    @rule(full=st.booleans())
    def fill_or_free_the_disk(self, full):
        self.journal._file = self.full if full else self.disk

    @invariant()
    def what_is_in_force_is_listed(self):
        assert set(self.in_force()) <= set(self.listed())

    @invariant()
    def nothing_is_in_force_while_halted(self):
        assert not (self.blocked and self.in_force())

    @invariant()
    def the_canary_met_no_fault(self):
        assert not self.asked_in_force

    @invariant()
    def what_is_over_was_told_of_once(self):
        over = [e["fault_id"] for e in self.journal.recent if e["event"] == "end"]
        begun = [e["fault_id"] for e in self.journal.recent if e["event"] == "start"]
        assert len(over) == len(set(over))
        if len(self.journal.recent) < 200:  # none has fallen out yet
            assert set(begun) - set(over) == set(self.listed())

    @invariant()
    def every_end_has_its_verdict_when_all_is_over(self):
        if not self.listed():
            ended = self.chaos.controller.status()["ended"]
            assert {fault["reverted"]["state"] for fault in ended} <= {"verified"}

    def teardown(self):
        self.journal._file = self.disk
        self.run(self.chaos.stop())
        assert not self.in_force()
        halted = self.blocked
        again = self.run(self.build())
        assert not again.controller.status()["faults"]
        assert again.controller.status()["lever"]["blocked"] in (halted, *self.told_late())
        self.loop.run_until_complete(again.stop())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        for patch in self.patches:
            patch.stop()
        os.close(self.full)
        shutil.rmtree(self.folder)

    def told_late(self):
        """Return what the lever may be after a restart although it was not: the disk was full then."""
        unwritten = any("unwritten" in e for e in self.journal.recent if e["event"] in ("halt", "unblock"))
        return (True, False) if unwritten else ()


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestController = Machine.TestCase
