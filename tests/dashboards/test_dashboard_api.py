"""The client against a real HTTP server that answers with recordings of an engine."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import pytest

from dashboards.api import Api, ApiError
from dashboards.settings import DashboardSettings
from dashboards.shapes import Kind

VIEWER_KEY, OPERATOR_KEY = "viewer-key-of-the-tests", "operator-key-of-the-tests"


def test_every_recording_is_understood(recorded_engine: Any) -> None:
    api = Api(recorded_engine.url, VIEWER_KEY)
    assert api.status().ready
    live = api.live(300)
    assert all(len(series) == len(live.time) for series in live.series.values())
    requests = api.requests(limit=5)
    assert all(request.started for request in requests)
    recorded = recorded_engine.answers["detail"]["request"]["request_id"]
    detail = api.request(recorded)
    assert detail is not None
    assert detail.layers.rows
    assert len(detail.tokens["surprisal"]) == len(detail.tokens["step"])
    tiers = api.tiers()
    assert [tier.tier for tier in tiers.tiers] == ["device", "host", "disk"]
    assert all(len(tier.ages) == len(tiers.age_edges_s) + 1 for tier in tiers.tiers)
    chaos = api.chaos()
    assert chaos.kinds
    assert {entry.event for entry in chaos.journal} >= {"start", "end"}
    alerts = api.alerts()
    assert alerts.all()
    assert api.request("unknown") is None
    api.close()


def test_operator_calls(recorded_engine: Any) -> None:
    api = Api(recorded_engine.url, VIEWER_KEY)
    fault = {"kind": "noise", "params": {}, "selector": {}, "ttl_s": 30.0, "seed": 0}
    api.start_fault(OPERATOR_KEY, fault)
    lease = api.chaos().faults[-1]
    assert (lease.kind, lease.remaining_s) == ("noise", 30.0)
    api.stop_fault(OPERATOR_KEY, lease.id)
    api.halt(OPERATOR_KEY)
    assert api.chaos().lever.blocked
    api.unblock(OPERATOR_KEY)
    assert not api.chaos().lever.blocked
    assert api.preview(OPERATOR_KEY, {"share": 0.5}).recent > 0
    with pytest.raises(ApiError) as refused:
        api.halt("wrong")
    assert refused.value.status == 401
    assert "operator.key" in refused.value.mend
    with pytest.raises(ApiError):
        api.halt("key\n")
    api.close()


def failure(url: str, key: str | None, call: str, *args: Any, timeout_s: float = 4.0) -> ApiError:
    with closing(Api(url, key, timeout_s)) as api, pytest.raises(ApiError) as caught:
        getattr(api, call)(*args)
    return caught.value


def test_failures_name_their_mend(recorded_engine: Any) -> None:
    assert "QUAVER_VIEWER_KEY" in failure(recorded_engine.url, "wrong", "status").mend
    recorded_engine.answers["live"] = {"time": "soon"}
    assert "/quaver/live was not understood" in failure(recorded_engine.url, VIEWER_KEY, "live", 10).message
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "did not answer in time" in failure(url, None, "status", timeout_s=0.1).message
    assert "quaver serve" in failure(url, None, "status").mend


def test_parameters_come_from_the_schema() -> None:
    schema = {
        "properties": {
            "sigma": {"type": "number", "minimum": 0, "maximum": 100, "default": 2.0},
            "side": {"enum": ["prefix", "suffix"], "default": "prefix", "description": "what is removed"},
            "harmless": {"type": "boolean", "default": False},
        }
    }
    sigma, side, harmless = Kind(kind="x", params=schema).parameters()
    assert (sigma.minimum, sigma.maximum, sigma.default) == (0.0, 100.0, 2.0)
    assert (side.choices, side.description) == (["prefix", "suffix"], "what is removed")
    assert harmless.type == "boolean"


def test_key_comes_from_the_variable_or_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("QUAVER_VIEWER_KEY", raising=False)
    monkeypatch.setenv("QUAVER_KEYS_DIR", str(tmp_path))
    assert DashboardSettings().read_key() is None
    (tmp_path / "viewer.key").write_text("secret\n")
    assert DashboardSettings().read_key() == "secret"
    monkeypatch.setenv("QUAVER_VIEWER_KEY", "other")
    assert DashboardSettings().read_key() == "other"
