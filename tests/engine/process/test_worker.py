"""The loop of the model process, in a thread, over a real socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from engine.core import Engine, load_engine
from engine.hooks import ModelHook
from engine.kv.disk_files import Files
from engine.messages import (
    Abort,
    AttachFault,
    DetachFault,
    FaultsActive,
    Ping,
    Ready,
    RequestMeta,
    SamplingParams,
    Shutdown,
    StepOutput,
    Submit,
    ToModel,
    decode_from_model,
    encode,
)
from engine.process import worker as worker_module
from engine.process.worker import Worker, load_hook
from engine.settings import EngineSettings


class Leases:
    """A model hook that changes nothing and keeps its leases."""

    on_tiers = on_pages = on_prompts = on_head = on_sampling = False
    files = Files

    def __init__(self) -> None:
        self.until: dict[str, float] = {}

    @property
    def active(self) -> bool:
        return bool(self.until)

    on_logits = active

    def attach(self, fault: AttachFault) -> None:
        if fault.kind != "nothing":
            raise ValueError(f"unknown kind {fault.kind!r}")
        self.until[fault.fault_id] = time.monotonic() + fault.ttl_s

    def detach(self, fault_id: str | None) -> None:
        if fault_id is None:
            self.until.clear()
        else:
            self.until.pop(fault_id, None)

    def expire(self, now: float) -> bool:
        over = [fault_id for fault_id, until in self.until.items() if until <= now]
        for fault_id in over:
            del self.until[fault_id]
        return bool(over)

    def fault_ids(self) -> list[str]:
        return list(self.until)

    def logits(self, metas, choices, steps, logits):
        return logits, {}


class Front:
    """A front that pings only when told to."""

    def __init__(self, engine: Engine, address: str) -> None:
        self.engine = engine
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.bind(address)
        theirs = self.context.socket(zmq.PAIR)
        theirs.connect(address)
        self.worker = Worker(engine, theirs, os.getppid())
        self.thread = threading.Thread(target=self._run, args=(theirs,))
        self.thread.start()
        assert isinstance(self.receive(), Ready)

    def _run(self, socket: zmq.Socket) -> None:
        with torch.inference_mode():
            self.worker.run()
        socket.close(linger=0)

    def send(self, *messages: ToModel) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def receive(self):
        assert self.socket.poll(5000), "the worker says nothing"
        return decode_from_model(self.socket.recv())

    def finish_of(self, request_id: str):
        while True:
            message = self.receive()
            if isinstance(message, StepOutput):
                for finish in message.finished:
                    if finish.request_id == request_id:
                        return finish

    def faults(self) -> FaultsActive:
        while not isinstance(message := self.receive(), FaultsActive):
            pass
        return message


@pytest.fixture
def front(write_folder: Callable, tmp_path: Path) -> Iterator[Front]:
    folder, _ = write_folder(max_position_embeddings=100_000)
    settings = EngineSettings(model=str(folder), max_context=100_000, kv_tokens=100_000, dtype="float32")
    front = Front(load_engine(settings, Leases()), f"ipc://{tmp_path}/s")
    yield front
    front.worker.stop(0, None)
    front.thread.join()
    front.socket.close(linger=0)
    front.context.term()
    front.engine.check()


def request(request_id: str, tokens: int = 4, prompt: list[int] | None = None) -> Submit:
    return Submit(
        meta=RequestMeta(request_id=request_id),
        token_ids=[5, 6, 7] if prompt is None else prompt,
        params=SamplingParams(max_tokens=tokens, ignore_eos=True),
    )


def test_a_request_runs_to_its_end(front: Front) -> None:
    front.send(request("a"))
    finish = front.finish_of("a")
    assert (finish.reason, finish.completion_tokens) == ("length", 4)


def test_a_request_that_can_never_run_is_answered(front: Front) -> None:
    front.send(request("a", prompt=[10**6]))
    finish = front.finish_of("a")
    assert finish.reason == "error"
    assert finish.error.startswith("invalid_prompt: ")


def test_abort_ends_a_running_request_and_ignores_others(front: Front) -> None:
    front.send(request("a", 90_000), Abort("b"))
    assert isinstance(front.receive(), StepOutput)
    front.send(Abort("a"))
    assert front.finish_of("a").reason == "abort"


def test_figures_of_the_tiers_come_while_nothing_runs_too(front: Front) -> None:
    for _ in range(2):
        while not (isinstance(told := front.receive(), StepOutput) and told.tiers):
            pass
        assert (told.step, told.duration_s) == (0, 0.0)
        assert [tier.tier for tier in told.tiers] == ["host"]


def test_faults_are_leases_and_a_refused_one_changes_nothing(front: Front) -> None:
    front.send(AttachFault(fault_id="f", kind="nothing", ttl_s=60))
    assert front.faults() == FaultsActive(["f"], 1)
    front.send(AttachFault(fault_id="g", kind="unheard of", ttl_s=60))
    assert front.faults() == FaultsActive(["f"], 2)
    front.send(DetachFault("f"), DetachFault("f"))
    assert [front.faults(), front.faults()] == [FaultsActive([], 3), FaultsActive([], 4)]
    front.send(AttachFault(fault_id="h", kind="nothing", ttl_s=0.05))
    assert front.faults() == FaultsActive(["h"], 5)
    assert front.faults() == FaultsActive([], 5)  # expired while idle


def test_without_heartbeat_faults_and_requests_end_once(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_module, "HEARTBEAT_S", 0.3)
    front.send(
        Ping(0.0),
        AttachFault(fault_id="f", kind="nothing", ttl_s=60),
        request("a", 90_000),
        request("b", 90_000),
    )
    assert front.faults().fault_ids == ["f"]
    assert front.faults().fault_ids == []
    first = front.finish_of("a")
    assert first.reason == "abort"
    time.sleep(0.7)
    assert caplog.text.count("no heartbeat") == 1
    front.send(Ping(0.0), request("c"))
    assert front.finish_of("c").reason == "length"


def test_shutdown_answers_what_runs(front: Front) -> None:
    front.send(request("a", 90_000), Shutdown())
    assert front.finish_of("a").reason == "abort"
    front.thread.join(5)
    assert not front.thread.is_alive()


def test_a_hook_is_named_by_module_and_factory() -> None:
    hook: ModelHook = load_hook("chaos.model_hook:factory")
    assert hook.fault_ids() == []
