from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from alerting.rules import PACKAGED, QuantilePreset, RawPreset, RulesError, load_rules

SIGNALS = ("confidence", "entropy")


def edited(tmp_path: Path, *path: str, value: object) -> Path:
    raw = yaml.safe_load(PACKAGED.read_text())
    node = raw
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


def test_packaged_rules_hold_the_documents_numbers() -> None:
    rules = load_rules()
    raw = rules.preset("raw")
    assert isinstance(raw, RawPreset)
    assert (raw.run, raw.confidence, raw.entropy, raw.l2.live_s, raw.l2.ratio) == (5, 0.65, 4.2, 3, 3)
    default = rules.preset(rules.default)
    assert isinstance(default, QuantilePreset)
    weights = default.mixture
    assert (weights.confidence, weights.entropy, weights.interruption) == (0.40, 0.35, 0.25)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("presets", "raw", "confidence"), 65, "presets.raw.confidence: Input should be less than 1"),
        (("presets", "raw", "runs"), 5, "presets.raw.runs: there is no such key"),
        (("presets", "quantile", "mixture", "entropy"), 0.5, "weights sum to 1.15"),
        (
            ("presets", "quantile", "statistics"),
            [{"name": "mood", "signal": "entropy", "side": "low"}],
            "mood|name",
        ),
        (("presets", "quantile", "levels"), [0.05, 0.1, 0.05], "presets.quantile: a level is listed twice"),
        (("presets", "quantile", "levels"), [], "presets.quantile.levels"),
        (
            ("presets", "quantile", "statistics"),
            [{"name": f"sentence_{s}", "signal": s, "side": "low", "tolerated": 0.5} for s in SIGNALS],
            "nothing could raise an L1",
        ),
        (("default",), "fancy", "no preset 'fancy'; the rules have: quantile, raw"),
        (("breaker", "probes_unhealthy"), 5, "probes_unhealthy must be below probes"),
        (("alerts", "l1_rate", "team"), "nobody", "alerts.l1_rate.team"),
        (("version",), 2, "version"),
    ],
)
def test_errors_say_where(tmp_path: Path, path: tuple[str, ...], value: object, message: str) -> None:
    with pytest.raises(RulesError, match=message):
        load_rules(edited(tmp_path, *path, value=value))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="cannot read"):
        load_rules(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    with pytest.raises(RulesError, match="not valid YAML"):
        load_rules(bad)
    bad.write_bytes(b"a: \xff")
    with pytest.raises(RulesError, match="not valid YAML"):
        load_rules(bad)
    bad.write_text("- 1")
    with pytest.raises(RulesError, match="mapping"):
        load_rules(bad)


def test_digest_follows_the_limits_and_nothing_else(tmp_path: Path) -> None:
    digest = load_rules().digest()
    assert load_rules(edited(tmp_path, "rate", "quiet_s", value=5)).digest() == digest
    assert load_rules(edited(tmp_path, "presets", "raw", "l2", "ratio", value=5)).digest() == digest
    assert load_rules(edited(tmp_path, "presets", "raw", "run", value=6)).digest() != digest
    assert load_rules(edited(tmp_path, "presets", "quantile", "alpha", value=0.1)).digest() != digest
