"""Which requests a selector reaches."""

from itertools import product

import pytest

from chaos.selector import Selector, parse_selector
from engine.messages import RequestMeta


def test_share_is_a_deterministic_fraction():
    selector = Selector(share=0.3)
    metas = [RequestMeta(request_id=f"req-{number}") for number in range(5000)]
    chosen = [selector.matches(meta, "noise-1", 7) for meta in metas]
    assert chosen == [selector.matches(meta, "noise-1", 7) for meta in metas]
    assert abs(sum(chosen) / 5000 - 0.3) < 5 * (0.3 * 0.7 / 5000) ** 0.5


def test_shares_of_two_faults_are_drawn_independently():
    selector = Selector(share=0.5)
    metas = [RequestMeta(request_id=f"req-{number}") for number in range(4000)]
    both = sum(selector.matches(m, "a", 7) and selector.matches(m, "b", 7) for m in metas)
    assert abs(both / 4000 - 0.25) < 0.035
    reseeded = sum(selector.matches(m, "a", 7) and selector.matches(m, "a", 8) for m in metas)
    assert abs(reseeded / 4000 - 0.25) < 0.035


def test_a_larger_share_contains_the_smaller_one():
    metas = [RequestMeta(request_id=f"req-{number}") for number in range(500)]
    small = {m.request_id for m in metas if Selector(share=0.2).matches(m, "f", 0)}
    large = {m.request_id for m in metas if Selector(share=0.6).matches(m, "f", 0)}
    assert small < large


def test_every_condition_has_to_hold():
    selector = Selector(tenant="gold", route="qa", header="x-experiment=blue=1")
    match = {"tenant": "gold", "route": "qa", "headers": {"x-experiment": "blue=1"}}
    assert selector.admits(RequestMeta(request_id="r", **match))
    for wrong in (
        {"tenant": "default"},
        {"route": "list"},
        {"headers": {}},
        {"headers": {"x-experiment": "blue"}},
    ):
        assert not selector.admits(RequestMeta(request_id="r", **{**match, **wrong}))


@pytest.mark.parametrize(
    "raw",
    [
        {"share": 0},
        {"share": 1.01},
        {"share": float("nan")},
        {"tenant": ""},
        {"header": "X-Upper=1"},
        {"header": "x-no-value"},
        {"header": "cookie=1"},
        {"who": "me"},
    ],
)
def test_a_wrong_selector_is_refused_by_name(raw):
    with pytest.raises(ValueError, match="selector"):
        parse_selector(raw)


def test_overlap_is_exact_for_every_pair_of_conditions():
    tenants, routes, headers = (None, "a", "b"), (None, "q", "r"), (None, "x-h=1", "x-h=2", "x-g=1")
    selectors = [Selector(tenant=t, route=r, header=h) for t, r, h in product(tenants, routes, headers)]
    values = product(("a", "b", "c"), ("q", "r", "s"), ("1", "2", "3"), ("1", "2"))
    metas = [
        RequestMeta(request_id="r", tenant=t, route=r, headers={"x-h": h, "x-g": g}) for t, r, h, g in values
    ]
    for one, other in product(selectors, selectors):
        meet = any(one.admits(meta) and other.admits(meta) for meta in metas)
        assert one.overlaps(other) == meet


def test_the_wire_form_reads_back():
    selector = Selector(share=0.25, tenant="gold", header="x-a=b")
    assert parse_selector(selector.to_wire()) == selector
