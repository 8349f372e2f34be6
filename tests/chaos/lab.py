"""A controller with the real hooks in one process, and what tests ask of it."""

import asyncio
import json

import pytest

from chaos.contract import ChaosError, StartFault
from chaos.model_hook import factory

TRUNCATION = {"kind": "truncation", "ttl_s": 30.0, "params": {"ratio": 0.5}}
AUTHORITY = {"kind": "authority", "ttl_s": 30.0}
NOISE = {"kind": "noise", "ttl_s": 30.0, "params": {"sigma": 2.0}}


class Process:
    """A model process with the real hook, in this one. `hung`: takes messages and never answers."""

    def __init__(self):
        self.hook = factory()
        self.fault_listeners = []
        self.hung = False

    async def attach_fault(self, fault):
        if self.hung:
            await asyncio.sleep(3600)
        self.hook.attach(fault)
        self._tell()
        return fault.fault_id in self.hook.fault_ids()

    async def detach_fault(self, fault_id=None):
        if self.hung:
            await asyncio.sleep(3600)
        self.hook.detach(fault_id)
        self._tell()
        return True

    def die(self):
        self.hook.detach(None)
        self._tell()

    def _tell(self):
        for listener in self.fault_listeners:
            listener(self.hook.fault_ids())


def story(path, without=("revert",)):
    """Return the journal's entries, those of verified reverts left out."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [entry for entry in entries if entry["event"] not in without]


async def start(chaos, base, **changes):
    return await chaos.controller.start(StartFault(**{**base, **changes}))


async def refused(chaos, base, code, **changes):
    with pytest.raises(ChaosError) as caught:
        await start(chaos, base, **changes)
    assert caught.value.code == code
    return str(caught.value)


async def eventually(condition, seconds=5):
    """Wait until something is so."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
