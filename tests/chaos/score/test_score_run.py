"""A small card on the real model: every figure is there, controls differ from faults, and a run goes on."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest

from chaos.score.junit import checks, junit
from chaos.score.page import page
from chaos.score.plan import CASES
from chaos.score.run import Sizes, _Run, score
from engine.models.store import ModelNotFound
from engine.settings import EngineSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SIZES = Sizes(n=12, calibration=64, contrast=16, replay=24, canaries=6, canary_rounds=8, canary_struck=1)
NAMES = ("absent_slot", "noise_3", "keys_rolled")
SETTINGS = EngineSettings(signal_budget=1.0, kv_host_mb=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("score")
    heard: list[tuple[str, int, int]] = []

    def go():
        heard.clear()
        cases = [case for case in CASES if case.name in NAMES]
        return score(SETTINGS, SIZES, folder, lambda *what: heard.append(what), cases), list(heard)

    try:
        return go, *go()
    except ModelNotFound as error:
        pytest.skip(str(error))


def test_gross_faults_are_seen_and_controls_are_not(run) -> None:
    _, card, heard = run
    assert heard[-1][1] == heard[-1][2]
    faults = card["faults"]
    assert list(faults) == list(NAMES)
    for name in ("noise_3", "keys_rolled"):
        fault = faults[name]
        assert fault["touched"] == 1 and fault["harm"]["value"] > 0.2
        assert fault["passive"]["auroc"] > 0.8 and fault["canary"]["auroc"] > 0.8
        assert fault["fpr_numeric"]["value"] < 0.5 < fault["recall_at_5"]["value"]
        assert fault["fpr_semantic"] is None
    assert faults["absent_slot"]["fpr_numeric"] is None
    assert card["blind"]["found_nothing"]
    assert set(card["raw_rule"]) == {"clean", *NAMES}
    assert card["clean"]["responses"] == 24
    assert card["clean"]["run_length"]["at_bound"]["ci"][0] > card["clean"]["run_length"]["wanted"]
    assert set(card["peers"]["EPR"]) == set(NAMES)
    assert faults["noise_3"]["responses_to_reset"] >= 20
    asked = faults["absent_slot"]["accuracy"]  # of the question that was asked
    assert asked["clean"] > asked["struck"]


def test_a_second_run_takes_what_is_there(run) -> None:
    go, first, _ = run
    again, heard = go()
    assert again["made"]["resumed"] and not first["made"]["resumed"]
    assert heard[-1][1] == heard[-1][2]
    assert {k: v for k, v in again.items() if k != "made"} == {k: v for k, v in first.items() if k != "made"}


def test_it_is_written_for_people_and_for_machines(run) -> None:
    _, card, _ = run
    assert json.loads(json.dumps(card, allow_nan=False)) == card
    text = page(card)
    assert all(fault["title"] in text for fault in card["faults"].values())
    assert "<script" not in text and "http" not in text
    suite = ET.fromstring(junit(card))
    found = list(checks(card))
    assert int(suite.get("tests")) == len(found) == len(suite)
    assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))


def test_other_numbers_are_another_run(tmp_path) -> None:
    settings = [
        {},
        {"weight_bits": "8"},
        {"dtype": "float32"},
        {"backend": "reference"},
        {"compensation": 0.5},
    ]
    runs = [
        _Run(EngineSettings(**(SETTINGS.model_dump() | own)), SIZES, tmp_path, lambda *_: None, CASES)
        for own in settings
    ]
    assert len({run._store._folder for run in runs}) == len(settings)
