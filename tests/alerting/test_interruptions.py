from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alerting.interruptions import TENANT_MEMORY_S, OutcomeWindow, TenantCap


@given(st.lists(st.tuples(st.sampled_from("aabc"), st.booleans()), max_size=80))
def test_no_tenant_counts_for_more_than_half_and_one(outcomes: list[tuple[str, bool]]) -> None:
    cap = TenantCap(0.5)
    for tenant in "abc":
        cap.allows(tenant, interrupted=False, now=0.0)
    counted: dict[str, int] = {}
    for tenant, interrupted in outcomes:
        if cap.allows(tenant, interrupted, 1.0) and interrupted:
            counted[tenant] = counted.get(tenant, 0) + 1
            others = sum(counted.values()) - counted[tenant]
            assert counted[tenant] <= others + 1


@given(st.lists(st.booleans(), max_size=40))
def test_a_tenant_alone_counts_fully(outcomes: list[bool]) -> None:
    cap = TenantCap(0.5)
    assert all(cap.allows("a", interrupted, 1.0) for interrupted in outcomes)


def test_a_tenant_long_gone_no_longer_caps() -> None:
    cap = TenantCap(0.5)
    cap.allows("b", interrupted=False, now=0.0)
    assert cap.allows("a", interrupted=True, now=1.0)
    assert not cap.allows("a", interrupted=True, now=1.0)
    assert cap.allows("a", interrupted=True, now=TENANT_MEMORY_S + 1)


def test_completions_are_never_left_out() -> None:
    cap = TenantCap(0.5)
    cap.allows("b", interrupted=False, now=0.0)
    assert all(cap.allows("a", interrupted=False, now=1.0) for _ in range(20))


def test_window_forgets_and_caps() -> None:
    window = OutcomeWindow(3.0, 0.5)
    for i in range(6):
        window.add(float(i), "a", interrupted=True)
    assert window.counts(5.0) == (4, 4)
    window.add(5.0, "b", interrupted=False)
    assert window.counts(5.0) == (1, 2)
    window.add(5.0, "b", interrupted=True)
    assert window.counts(5.0) == (3, 4)
    assert window.counts(50.0) == (0, 0)
