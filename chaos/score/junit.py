"""The card's targets as JUnit XML, so that CI shows which are reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree as ET


def checks(card: Mapping[str, Any]) -> Iterator[tuple[str, float | None, float, bool]]:
    """Yield every target: its name, the figure, what it has to reach, whether it does."""
    for name, fault in card["faults"].items():
        target = fault["target"]
        probed = [p["auroc"] for p in (fault["tap"], fault["canary"]) if p["auroc"] is not None]
        for what, value, least in (
            ("passive AUROC", fault["passive"]["auroc"], target["passive"]),
            ("tap or canary AUROC", max(probed, default=None), target["probed"]),
        ):
            if least is not None:
                yield f"{name}: {what}", value, least, value is not None and value >= least
        for what, value, most in (
            ("responses to the page", fault["responses_to_detect"], target["responses"]),
            ("canaries to the page", fault["canary_responses_to_detect"], target["canaries"]),
        ):
            if most is not None:
                yield f"{name}: {what}", value, most, value is not None and value <= most
    clean = card["clean"]
    yield "pages without a fault", clean["paged"], 1, clean["paged"] <= 1
    length = clean["run_length"]
    mean = length["resampled"]["value"] or length["resampled"]["ci"][0]
    yield "responses between false pages, simulated", mean, length["wanted"], mean >= length["wanted"]
    blind = card["blind"]["found_nothing"]
    yield "shuffled labels find nothing", float(blind), 1, blind


def junit(card: Mapping[str, Any]) -> str:
    """Return the XML: a test case for each target."""
    found = list(checks(card))
    failed = sum(not reached for *_, reached in found)
    suite = ET.Element("testsuite", name="scorecard", tests=str(len(found)), failures=str(failed))
    for name, value, wanted, reached in found:
        case = ET.SubElement(suite, "testcase", classname="scorecard", name=name)
        if not reached:
            shown = "nothing" if value is None else f"{value:.3g}"
            ET.SubElement(case, "failure", message=f"{shown}; it has to reach {wanted:g}")
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
