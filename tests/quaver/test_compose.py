"""compose.yaml and what it mounts: loopback only, no secret, health checks, pinned images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_every_service_the_documentation_names_is_there() -> None:
    assert {"engine", "dashboard", "prometheus", "alertmanager", "otel-collector", "locust"} <= set(SERVICES)
    assert SERVICES["locust"]["profiles"] == ["load"]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_ports_are_on_loopback(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_nobody_gains_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")


def test_no_secret_is_written_down() -> None:
    assert not re.search(r"(?i)\b(password|token|secret|api_?key)\b\s*[:=]\s*\S", TEXT)
    assert not re.search(r"qv-(operator|client|viewer|webhook)-", TEXT)


def test_images_of_others_have_a_tag() -> None:
    for service in SERVICES.values():
        if "build" not in service:
            assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"])


def test_chaos_is_off_unless_asked_for() -> None:
    assert SERVICES["engine"]["environment"]["QUAVER_CHAOS"] == "${QUAVER_CHAOS:-0}"


def test_health_is_checked_where_an_image_can() -> None:
    for name in ("prometheus", "alertmanager"):
        assert "healthcheck" in SERVICES[name]
    for target in ("engine", "dashboard", "locust"):
        stage = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert "HEALTHCHECK" in stage
        assert stage.rindex("USER quaver") > stage.rfind("USER root")


def test_build_context_holds_what_the_image_copies() -> None:
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M) for word in line.split()
    }
    assert copied <= allowed


def test_collector_never_sends_traces_to_prometheus() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "otel-collector.yaml").read_text(encoding="utf-8"))
    pipelines = config["service"]["pipelines"]
    assert "prometheus" in pipelines["metrics"]["exporters"]
    assert "prometheus" not in pipelines["traces"]["exporters"]
    defined = {kind: set(config[kind]) for kind in ("receivers", "processors", "exporters")}
    for pipeline in pipelines.values():
        for kind, names in defined.items():
            assert set(pipeline.get(kind, [])) <= names
