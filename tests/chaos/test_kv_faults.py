"""Faults on KV pages, on a small random model: whom they reach, and what is left of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from chaos.faults.kv_flip import bits_of
from chaos.model_hook import factory
from engine import kernels
from engine.core import Engine
from engine.kernels.cpu import build
from engine.kernels.cpu.library import open_library
from engine.kv.disk_files import Files
from engine.messages import TOKEN_SIGNALS, AttachFault, RequestMeta, SamplingParams, Submit
from engine.models.config import weight_shapes
from engine.models.llama import Llama
from engine.models.native import NativeLlama
from engine.models.weights import stored
from engine.settings import EngineSettings
from tests.engine.tiny import TINY

CONFIG = replace(TINY, hidden=64, layers=3, head_dim=16, intermediate=96, max_context=256)
PAGE = 4
SALT = b"tenant"
FAULTS = {
    "kv_flip": {"bit": "exponent", "burst": 2},
    "kv_shift": {"pages": 1},
    "kv_roll": {"positions": 3},
    "kv_rope": {"positions": 5},
    "kv_swap": {"pages": 3},
}
CONTROLS = {
    "kv_flip": {"burst": 0},
    "kv_shift": {"pages": 0},
    "kv_roll": {"positions": 0},
    "kv_rope": {"positions": 0},
    "kv_swap": {"pages": 0},
}


def prompt_of(length, seed):
    return np.random.default_rng(seed).integers(1, CONFIG.vocab, length).tolist()


PROMPTS = {"hit-1": prompt_of(30, 1), "spared": prompt_of(41, 2), "hit-2": prompt_of(22, 3)}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def model(request):
    """Random weights on each backend: pages in float32, and in bfloat16."""
    source = torch.Generator().manual_seed(7)
    weights = {
        name: stored(torch.ones(shape) if "norm" in name else torch.randn(shape, generator=source) * 0.3)
        for name, shape in weight_shapes(CONFIG).items()
    }
    if request.param == "reference":
        return Llama(CONFIG, weights, torch.float32, kernels.load("reference"))
    settings = EngineSettings()
    library = open_library(build.instruction_sets()[0], settings.kernel_cache)
    return NativeLlama(CONFIG, weights, library, name="native", bits=8, threads=1, positions=256)


def engine(model, **changes):
    values = {"kv_tokens": 512, "page_size": PAGE, "step_tokens": 16, "deterministic": True} | changes
    return Engine(model, EngineSettings(**values), factory())


def attach(target, kind, selector=None, ttl_s=60.0, fault_id="f", **params):
    message = AttachFault(
        fault_id=fault_id, kind=kind, params=params, selector=selector or {}, seed=3, ttl_s=ttl_s
    )
    target.hook.attach(message)


def submit(name, prompt, tokens=12, choice=0, salt=SALT):
    return Submit(
        meta=RequestMeta(request_id=name, tenant=name.split("-")[0]),
        choice=choice,
        token_ids=prompt,
        params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        cache_salt=salt,
    )


def run(target, *requests):
    """Return each request's tokens and signals, as bytes, and the requests struck."""
    for request in requests:
        target.submit(request)
    found = {}
    struck = {}
    while target.has_work:
        output = target.step()
        target.check()
        struck |= output.touched
        tokens = np.frombuffer(output.token_ids, np.int32)
        signals = np.frombuffer(output.signals, np.float32).reshape(-1, len(TOKEN_SIGNALS))
        for row, name in enumerate(output.request_ids):
            entry = found.setdefault(name, [])
            entry.append((output.choices[row], int(tokens[row]), signals[row].tobytes()))
    target.roster.cache.check([])
    return found, set(struck)


def everyone():
    return [submit(name, prompt) for name, prompt in PROMPTS.items()]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("kind", FAULTS)
def test_who_is_selected_changes_and_nobody_else_in_the_batch(model, kind, deterministic):
    clean, nobody = run(engine(model, deterministic=deterministic), *everyone())
    assert nobody == set()
    target = engine(model, deterministic=deterministic)
    attach(target, kind, {"tenant": "hit"}, **FAULTS[kind])
    found, struck = run(target, *everyone())
    assert struck == {"hit-1", "hit-2"}
    assert found["spared"] == clean["spared"]
    for name in struck:
        assert found[name][0] == clean[name][0]  # of the prompt's own step, before the fault
        assert found[name][1:] != clean[name][1:]


@pytest.mark.parametrize("kind", CONTROLS)
def test_the_control_strikes_and_changes_no_bit(model, kind):
    clean, _ = run(engine(model), *everyone())
    target = engine(model)
    names = ["hit-1", "hit-2"] if kind == "kv_swap" else list(PROMPTS)
    attach(target, kind, **CONTROLS[kind])
    found, struck = run(target, *everyone())
    assert struck == set(names)
    assert found == clean


@pytest.mark.parametrize("kind", FAULTS)
def test_nobody_reads_struck_pages_afterwards(model, kind):
    clean, _ = run(engine(model), *everyone())
    target = engine(model)
    attach(target, kind, {"tenant": "hit"}, **FAULTS[kind])
    run(target, *everyone())
    target.hook.detach(None)
    again, struck = run(target, *everyone())
    assert struck == set()
    assert again == clean
    assert target.pool.free + target.roster.cache.idle == target.pool.pages


@pytest.mark.parametrize("kind", FAULTS)
def test_pages_that_others_own_are_copied_first(model, kind):
    """Two struck requests and a spared one begin with the same pages of the prefix cache."""
    prefix = prompt_of(32, 9)
    requests = [submit(name, prefix + prompt[:9]) for name, prompt in PROMPTS.items()]
    target = engine(model)
    run(target, submit("first", [*prefix, 1, 2, 3]))
    clean, _ = run(target, *requests)
    attach(target, kind, {"tenant": "hit"}, **FAULTS[kind])
    hits = target.stats().prefix_hits
    found, struck = run(target, *requests)
    assert target.stats().prefix_hits > hits
    assert struck == {"hit-1", "hit-2"}
    assert found["spared"] == clean["spared"]
    if kind != "kv_swap":  # the pages that both begin with are the same
        assert all(found[name] != clean[name] for name in struck)
    target.hook.detach(None)
    assert run(target, *requests)[0] == clean


def test_choices_of_a_struck_request_and_one_of_another_do_not_share_with_it(model):
    prompt = prompt_of(33, 5)
    requests = [submit("hit", prompt, choice=choice, salt=b"") for choice in (0, 1)]
    clean, _ = run(engine(model), *requests)
    target = engine(model)
    attach(target, "kv_roll", positions=2)
    found, _ = run(target, *requests)
    assert sorted(found["hit"][:2]) == sorted(clean["hit"][:2])
    assert sorted(found["hit"]) != sorted(clean["hit"])


@pytest.mark.parametrize("kind", FAULTS)
def test_ending_a_fault_in_mid_answer_leaves_the_others_as_they_were(model, kind):
    clean, _ = run(engine(model), *everyone())
    target = engine(model)
    attach(target, kind, {"tenant": "hit"}, **FAULTS[kind])
    for request in everyone():
        target.submit(request)
    for _ in range(9):
        target.step()
    target.hook.detach("f")
    assert not target.hook.active and not target.hook.on_pages
    late, _ = run(target, submit("late", PROMPTS["hit-1"]))
    rest = late["spared"]
    assert rest == clean["spared"][-len(rest) :]
    assert [row[1:] for row in late["late"]] == [row[1:] for row in clean["hit-1"]]


def test_a_fault_without_room_for_copies_waits(model):
    prompt = prompt_of(32, 4)
    target = engine(model, kv_tokens=256, prefix_cache=True)
    run(target, submit("first", [*prompt, 5]))
    target.submit(submit("one", [*prompt, 6], tokens=4))
    target.submit(submit("other", [*prompt, 7], tokens=4))
    target.step()
    target.step()
    kept = target.roster.cache.take(target.pool.free + target.roster.cache.idle)
    attach(target, "kv_rope")
    tables = [list(sequence.pages) for sequence in target.roster.running]
    assert target.step().touched == {}
    assert [list(sequence.pages) for sequence in target.roster.running] == tables
    assert not any(sequence.tainted for sequence in target.roster.running)
    target.roster.cache.release(kept)
    assert set(target.step().touched) == {"one", "other"}


def test_each_page_is_hit_once_when_it_is_full(model):
    target = engine(model)
    target.submit(submit("a", prompt_of(10, 1), tokens=12, salt=b""))
    target.step()
    attach(target, "kv_flip", bit="mantissa", from_token=3)
    hits = []
    while target.has_work:
        pages = list(target.roster.running[0].pages[:5])
        full = target.roster.running[0].computed // PAGE
        before = [kept[:, pages].clone() for kept in (target.pool.keys, target.pool.values)]
        target.step()
        after = [kept[:, pages] for kept in (target.pool.keys, target.pool.values)]
        same = [same_pages(old, new) for old, new in zip(before, after, strict=True)]
        hits.append([place for place in range(full) if not (same[0] & same[1])[place]])
    # Tokens 1 and 2 come before; pages 0 and 1 are full then, the others as the answer grows.
    assert hits[:7] == [[], [], [0, 1, 2], [], [], [], [3]]


@pytest.mark.parametrize(("burst", "part"), [(1, "sign"), (1, "mantissa"), (3, "any"), (16, "exponent")])
def test_a_flip_changes_as_many_bits_as_it_says(model, burst, part):
    target = engine(model)
    target.submit(submit("a", prompt_of(PAGE + 1, 1), tokens=8))
    target.step()
    kept = target.pool.values
    before = kept.clone()
    attach(target, "kv_flip", burst=burst, bit=part, where="values")
    target.step()
    integer = {2: torch.int16, 4: torch.int32}[kept.itemsize]
    page = target.roster.running[0].pages[0]
    old, new = (x[:, page].flatten().view(integer).tolist() for x in (before, kept))
    width = 8 * kept.itemsize
    flipped = [
        width * place + bit
        for place, (one, other) in enumerate(zip(old, new, strict=True))
        for bit in range(width)
        if (one ^ other) >> bit & 1
    ]
    assert flipped == list(range(flipped[0], flipped[0] + burst))
    assert flipped[0] % width in bits_of(kept.dtype, part)


def test_the_parts_of_a_number_are_where_they_are():
    for dtype, mantissa, exponent in ((torch.bfloat16, 7, 8), (torch.float32, 23, 8), (torch.float16, 10, 5)):
        assert bits_of(dtype, "mantissa") == range(mantissa)
        assert bits_of(dtype, "exponent") == range(mantissa, mantissa + exponent)
        assert bits_of(dtype, "sign") == range(mantissa + exponent, mantissa + exponent + 1)


def same_pages(one, other):
    """Which pages of [layers, pages, …] hold the same bits, NaN included: bool [pages]."""
    integer = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return (one.view(integer) == other.view(integer)).transpose(0, 1).flatten(1).all(1)


def test_a_rate_strikes_some_pages_in_each_step(model):
    target = engine(model)
    target.submit(submit("a", prompt_of(60, 1), tokens=40))
    while not target.roster.running or not target.roster.running[0].decoding:
        target.step()
    attach(target, "kv_flip", rate=0.2, bit="any")
    shares = []
    while target.has_work:
        sequence = target.roster.running[0]
        pages = sequence.pages[: sequence.computed // PAGE]
        before = [kept[:, pages].clone() for kept in (target.pool.keys, target.pool.values)]
        target.step()
        after = [kept[:, pages] for kept in (target.pool.keys, target.pool.values)]
        same = [same_pages(old, new) for old, new in zip(before, after, strict=True)]
        shares.append(1 - (same[0] & same[1]).float().mean().item())
    assert shares.pop() == 1  # zeroed at the end
    assert 0.1 < np.mean(shares) < 0.3


def test_rolled_keys_stand_beside_other_values_in_their_layers_alone(model):
    target = engine(model)
    target.submit(submit("a", prompt_of(10, 1)))
    target.step()
    sequence = target.roster.running[0]

    def rows(kept):
        return kept[:, sequence.pages].flatten(1, 2)[:, :10].clone()

    keys, values = rows(target.pool.keys), rows(target.pool.values)
    attach(target, "kv_roll", positions=2, first_layer=1, layers=1)
    target.step()
    assert torch.equal(rows(target.pool.values), values)
    assert torch.equal(rows(target.pool.keys)[1], keys[1].roll(2, 0))
    assert torch.equal(rows(target.pool.keys)[[0, 2]], keys[[0, 2]])


@pytest.mark.parametrize("positions", [7, -3])
def test_rotated_keys_are_those_of_later_positions(model, positions):
    """Keys of the first layer depend on token and position alone."""
    target = engine(model)
    prompt = [9, 5, 9, 9, 9, 5, 9, 9, 5, 9, 9, 9, 5]
    target.submit(submit("a", prompt))
    target.step()
    sequence = target.roster.running[0]

    def rows():
        return target.pool.keys[0, sequence.pages].flatten(0, 1)[:12].float().clone()

    keys = rows()
    attach(target, "kv_rope", positions=positions)
    target.step()
    pairs = [(i, i + positions) for i in range(12) if 0 <= i + positions < 12]
    same = [(i, j) for i, j in pairs if prompt[i] == prompt[j]]
    assert len(same) > 2
    for i, j in same:
        torch.testing.assert_close(rows()[i], keys[j], rtol=0.02, atol=0.02 * float(keys.abs().max()))


def test_a_shifted_table_reads_the_page_before(model):
    target = engine(model)
    target.submit(submit("a", prompt_of(18, 1), salt=b""))
    target.step()
    target.step()
    table = list(target.roster.running[0].pages)
    attach(target, "kv_shift", pages=1)
    target.step()
    assert target.roster.running[0].pages == [table[3], *table[:3], *table[4:]]


def test_swaps_stay_within_the_selection_and_within_a_tenant(model):
    target = engine(model)
    names = ["a-1", "b-1", "a-2", "a-3", "b-2", "c-1"]
    for seed, name in enumerate(names):
        target.submit(submit(name, prompt_of(14, seed)))
    target.step()
    attach(target, "kv_swap", {"tenant": "a"}, pages=2)
    while len([s for s in target.roster.running if s.decoding]) < len(names):
        target.step()
    target.hook.detach(None)
    owners = {s.key[0]: set(s.pages) for s in target.roster.running}
    attach(target, "kv_swap", fault_id="g", pages=2)
    struck = set(target.step().touched)
    assert struck == {"a-1", "a-2", "b-1", "b-2"}
    moved = {s.key[0]: set(s.pages) - owners[s.key[0]] for s in target.roster.running}
    assert {name for name, pages in moved.items() if pages} == struck
    assert all(len(pages) == 2 for name, pages in moved.items() if name in struck)
    assert moved["a-1"] <= owners["a-2"] and moved["b-2"] <= owners["b-1"]


class Poison:
    """A hook that leaves nothing but NaN in the pages of one tenant's requests."""

    active = on_pages = True
    on_tiers = on_logits = on_prompts = on_head = on_sampling = False
    files = Files

    def pages(self, roster, config):
        for sequence in roster.running:
            if sequence.request.meta.tenant == "hit" and sequence.decoding and roster.seclude(sequence):
                for kept in (roster.pool.keys, roster.pool.values):
                    kept[:, sequence.pages] = float("nan")
        return {}


@pytest.mark.parametrize("deterministic", [True, False])
def test_nan_reaches_neither_a_shorter_neighbour_nor_the_next_owner(model, deterministic):
    """Tables are padded, and pages have places that are not written to yet."""
    values = {"signal_budget": 1.0, "deterministic": deterministic, "prefix_cache": False}
    requests = [submit("hit", prompt_of(70, 1), tokens=30), submit("spared", prompt_of(9, 2), tokens=25)]
    clean, _ = run(engine(model, **values), *requests)
    target = engine(model, **values)
    target.hooked.hook = Poison()
    found, _ = run(target, *requests)
    assert found["spared"] == clean["spared"]
    assert found["hit"] != clean["hit"]
    target.hooked.hook = None
    assert target.pool.keys.isfinite().all() and target.pool.values.isfinite().all()
    assert run(target, *requests)[0] == clean


def test_a_lease_on_pages_ends_by_itself(model):
    target = engine(model)
    attach(target, "kv_rope", ttl_s=1e-6)
    assert run(target, *everyone())[1] == set()


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("kv_flip", {"burst": 17}),
        ("kv_flip", {"bit": "parity"}),
        ("kv_flip", {"rate": 1.5}),
        ("kv_flip", {"where": "weights"}),
        ("kv_shift", {"pages": 1.5}),
        ("kv_roll", {"first_layer": -1}),
        ("kv_rope", {"positions": 10**9}),
        ("kv_swap", {"pages": -1}),
        ("kv_swap", {"from_token": 0}),
    ],
)
def test_what_is_not_valid_is_refused(kind, params):
    hook = factory()
    with pytest.raises(ValueError, match=kind):
        hook.attach(AttachFault(fault_id="f", kind=kind, params=params, ttl_s=1.0))
    assert not hook.on_pages
