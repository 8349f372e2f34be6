"""Noise on logits: its statistics, and what it must not touch."""

import time

import pytest
import torch

from chaos.model_hook import factory
from engine.messages import AttachFault, RequestMeta

VOCAB = 4096


def attach(hook, sigma=2.0, ttl_s=60.0, selector=None, fault_id="noise-1", **params):
    message = AttachFault(
        fault_id=fault_id,
        kind="noise",
        params={"sigma": sigma, **params},
        selector=selector or {},
        seed=11,
        ttl_s=ttl_s,
    )
    hook.attach(message)


def metas(*ids, **fields):
    return [RequestMeta(request_id=name, **fields) for name in ids]


def test_noise_is_gaussian_with_the_given_sigma():
    hook = factory()
    attach(hook, sigma=2.0)
    rows = 32
    logits = torch.zeros(rows, VOCAB)
    noised, changed = hook.logits(metas(*(f"r{i}" for i in range(rows))), [0] * rows, [3] * rows, logits)
    assert changed == {row: ["noise-1"] for row in range(rows)}
    count = rows * VOCAB
    assert abs(noised.mean().item()) < 5 * 2.0 / count**0.5
    assert noised.std().item() == pytest.approx(2.0, abs=5 * 2.0 / (2 * count) ** 0.5)
    kurtosis = ((noised / 2.0) ** 4).mean().item()
    assert kurtosis == pytest.approx(3.0, abs=0.2)
    correlation = torch.corrcoef(noised).fill_diagonal_(0).abs().max().item()
    assert correlation < 0.1  # rows are independent of each other


def test_noise_depends_on_request_choice_and_step_but_not_on_the_batch():
    hook = factory()
    attach(hook)
    row = torch.randn(1, VOCAB)
    alone, _ = hook.logits(metas("b"), [1], [5], row)
    crowd, _ = hook.logits(metas("a", "b", "c"), [0, 1, 0], [2, 5, 9], row.repeat(3, 1))
    assert torch.equal(alone[0], crowd[1])
    other_choice, _ = hook.logits(metas("b"), [0], [5], row)
    other_step, _ = hook.logits(metas("b"), [1], [6], row)
    assert not torch.equal(alone, other_choice)
    assert not torch.equal(alone, other_step)


def test_the_control_runs_the_same_path_and_changes_no_number():
    hook = factory()
    attach(hook, sigma=0.0)
    logits = torch.randn(3, VOCAB)
    logits[0, 7] = float("-inf")
    result, changed = hook.logits(metas("a", "b", "c"), [0] * 3, [0] * 3, logits)
    assert torch.equal(result, logits)
    assert set(changed) == {0, 1, 2}


def test_unmatched_rows_are_bit_identical_and_the_argument_is_never_written():
    hook = factory()
    attach(hook, selector={"route": "qa"})
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    mixed = [RequestMeta(request_id="a", route="qa"), RequestMeta(request_id="b", route="list")]
    result, changed = hook.logits(mixed, [0, 0], [0, 0], logits)
    assert changed == {0: ["noise-1"]}
    assert torch.equal(result[1], before[1])
    assert torch.equal(logits, before)
    untouched, changed = hook.logits(metas("a", "b", route="list"), [0, 0], [0, 0], logits)
    assert untouched is logits
    assert changed == {}


def test_noise_starts_at_its_token():
    hook = factory()
    attach(hook, from_token=2)
    logits = torch.zeros(2, VOCAB)
    _, changed = hook.logits(metas("a", "b"), [0, 0], [1, 2], logits)
    assert changed == {1: ["noise-1"]}


def test_canaries_are_selected_as_traffic_is():
    hook = factory()
    attach(hook, selector={"share": 0.5})
    ids = [f"r{i}" for i in range(40)]
    logits = torch.zeros(40, 8)
    _, traffic = hook.logits(metas(*ids), [0] * 40, [0] * 40, logits)
    _, canaries = hook.logits(metas(*ids, canary=True), [0] * 40, [0] * 40, logits)
    assert traffic == canaries
    assert 0 < len(traffic) < 40


def test_a_lease_ends_by_itself():
    hook = factory()
    attach(hook, ttl_s=0.05)
    assert hook.active
    assert hook.fault_ids() == ["noise-1"]
    assert not hook.expire(time.monotonic())
    time.sleep(0.06)
    logits = torch.zeros(1, 8)
    assert hook.logits(metas("a"), [0], [0], logits)[0] is logits  # even before anyone calls expire
    assert hook.expire(time.monotonic())
    assert not hook.active
    assert not hook.expire(time.monotonic())


def test_detach_is_idempotent_and_takes_all():
    hook = factory()
    attach(hook)
    attach(hook, fault_id="noise-2", selector={"tenant": "other"})
    hook.detach("noise-1")
    hook.detach("noise-1")
    assert hook.fault_ids() == ["noise-2"]
    hook.detach(None)
    hook.detach(None)
    assert not hook.active


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "nonsense"},
        {"params": {"sigma": -1.0}},
        {"params": {"sigma": float("nan")}},
        {"params": {"sigma": 1.0, "unknown": 1}},
        {"params": {"from_token": -1}},
        {"selector": {"share": 0.0}},
        {"selector": {"header": "authorization=x"}},
        {"ttl_s": 0.0},
        {"ttl_s": float("inf")},
    ],
)
def test_what_is_not_valid_is_refused_and_leaves_nothing(message):
    hook = factory()
    fields = {"fault_id": "n", "kind": "noise", "ttl_s": 1.0, **message}
    with pytest.raises(ValueError):
        hook.attach(AttachFault(**fields))
    assert not hook.active
    assert hook.fault_ids() == []


def test_the_model_process_imports_nothing_heavy_for_it():
    import subprocess
    import sys

    code = (
        "import sys, chaos.model_hook as m; m.factory();"
        "bad = {'starlette', 'pydantic', 'httpx', 'transformers', 'chaos.controller'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
