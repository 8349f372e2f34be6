"""Faults that meet on a request: composed in their declared order, whichever came first, or refused."""

import itertools

import pytest
import torch

from chaos.caps import Caps, numbers_of
from chaos.contract import StartFault
from chaos.faults.registry import KINDS, MODEL_KINDS
from chaos.service import Chaos
from chaos.settings import ChaosSettings
from engine.messages import RequestMeta
from tests.chaos.lab import AUTHORITY, NOISE, TRUNCATION, Process, refused, start

KV_FLIP = {"kind": "kv_flip", "ttl_s": 30.0}
ASKED = [{"role": "user", "content": "Bo is old. Cy is new. Di is tall.\n\nWho is old?"}]
META = RequestMeta(request_id="r1", tenant="gold", route="qa")


@pytest.fixture
async def make(tmp_path):
    made = []

    async def make(**settings):
        service = Chaos(ChaosSettings(chaos=True, **settings), Process(), tmp_path / f"{len(made)}.jsonl")
        service.model = service.controller._model
        made.append(service)
        return service

    yield make
    for service in made:
        await service.stop()


def listed(chaos):
    return {fault["kind"]: fault for fault in chaos.controller.status()["faults"]}


@pytest.mark.parametrize("bases", list(itertools.permutations([AUTHORITY, TRUNCATION, NOISE])))
async def test_kinds_compose_in_their_order_whichever_was_first(make, bases):
    chaos = await make()
    for base in bases:
        await start(chaos, base, seed=3)
    found = listed(chaos)
    order = [found[kind]["fault_id"] for kind in ("authority", "truncation", "noise")]
    assert [fault["chain"] for fault in found.values()] == [order] * 3
    messages, touched = chaos.prompt_hook.apply(META, ASKED)
    assert touched == order[:2]
    text = messages[0]["content"]
    assert "Bo is old" not in text  # the truncation cut the passage after the authority had joined it
    assert "has established" in text
    assert text == (await composed(make, [AUTHORITY, TRUNCATION]))[0]["content"]


async def composed(make, bases):
    chaos = await make()
    for base in bases:
        await start(chaos, base, seed=3)
    return chaos.prompt_hook.apply(META, ASKED)[0]


@pytest.mark.parametrize("bases", [(NOISE, KV_FLIP), (KV_FLIP, NOISE)])
async def test_faults_in_the_model_compose_in_their_order(make, bases):
    chaos = await make()
    for base in bases:
        await start(chaos, base)
    hook = chaos.model.hook
    order = [listed(chaos)[kind]["fault_id"] for kind in ("kv_flip", "noise")]
    assert [lease.fault_id for lease in hook.chain(0.0)] == order
    _, changed = hook.logits([META], [0], [0], torch.zeros(1, 8))
    assert changed == {0: order[1:]}


@pytest.mark.parametrize("swap", [False, True])
async def test_one_kind_is_refused_on_the_same_requests_in_both_orders(make, swap):
    chaos = await make()
    first, second = ({"tenant": "gold"}, {"route": "qa"})[:: -1 if swap else 1]
    one = await start(chaos, NOISE, selector=first)
    assert one["fault_id"] in await refused(chaos, NOISE, "overlap", selector=second)
    assert listed(chaos)["noise"]["selector"] == {"share": 1.0} | first  # nothing was overridden


async def test_faults_that_never_meet_are_in_no_common_chain(make):
    chaos = await make()
    noise = await start(chaos, NOISE, selector={"tenant": "gold"})
    truncation = await start(chaos, TRUNCATION, selector={"tenant": "silver"})
    assert noise["chain"] == [noise["fault_id"]]
    assert truncation["chain"] == [truncation["fault_id"]]


@pytest.fixture
def process_kind(monkeypatch):
    """A fault of the whole process, made of the noise."""

    class Everywhere(KINDS["noise"], frozen=True, kw_only=True):
        kind = "everywhere"
        scope = "process"

    monkeypatch.setitem(KINDS, "everywhere", Everywhere)
    monkeypatch.setitem(MODEL_KINDS, "everywhere", Everywhere)
    return {"kind": "everywhere", "ttl_s": 30.0}


async def test_a_fault_of_the_process_takes_no_selector_and_is_one_of_its_kind(make, process_kind):
    chaos = await make()
    message = await refused(chaos, process_kind, "invalid_fault", selector={"tenant": "gold"})
    assert "takes no selector" in message
    await refused(chaos, process_kind, "invalid_fault", selector={"share": 0.5})
    await start(chaos, process_kind)
    assert "another tenant" not in await refused(chaos, process_kind, "overlap")
    noise = await start(chaos, NOISE, selector={"tenant": "gold"})
    assert len(noise["chain"]) == 2
    capped = await make(chaos_max_share=0.5)
    await refused(capped, process_kind, "over_cap")


async def test_a_preview_of_a_start_tells_whom_it_reaches_and_what_it_meets(make):
    chaos = await make()
    for number in range(4):
        chaos._admission.seen(RequestMeta(request_id=str(number), tenant="gold" if number else "x"))
    chaos._admission.seen(RequestMeta(request_id="c", tenant="gold", canary=True))
    noise = await start(chaos, NOISE)

    asked = StartFault(**TRUNCATION, selector={"tenant": "gold", "share": 0.5})
    told = chaos.controller.preview(asked)
    assert (told["recent"], told["admitted"], told["expected"]) == (4, 3, 1.5)
    assert told["chain"] == [told["fault"]["fault_id"], noise["fault_id"]]
    assert list(listed(chaos)) == ["noise"]  # nothing was started


def test_every_number_of_every_kind_has_an_upper_bound():
    for kind in Caps({}).kinds:
        for name in numbers_of(KINDS[kind["kind"]]):
            field = kind["params"]["properties"][name]
            assert "maximum" in field or "exclusiveMaximum" in field, f"{kind['kind']}.{name}"


async def test_a_server_caps_any_number_of_any_kind_in_both_directions(make):
    chaos = await make(chaos_caps={"kv_rope.positions": 4, "kv_flip.burst": 1})
    rope = {"kind": "kv_rope", "ttl_s": 30.0}
    for positions in (5, -5):
        message = await refused(chaos, rope, "over_cap", params={"positions": positions})
        assert "positions of at most 4" in message
    await start(chaos, rope, params={"positions": -4})
    schema = {kind["kind"]: kind["params"]["properties"] for kind in chaos.controller.status()["kinds"]}
    assert (schema["kv_rope"]["positions"]["minimum"], schema["kv_rope"]["positions"]["maximum"]) == (-4, 4)
    assert schema["kv_flip"]["burst"]["maximum"] == 1


@pytest.mark.parametrize("name", ["noise.sgima", "nose.sigma", "kv_flip.bit", "sigma"])
def test_a_cap_of_nothing_is_refused_at_once(name):
    with pytest.raises(ValueError, match="is no KIND"):
        ChaosSettings(chaos_caps={name: 1.0})
