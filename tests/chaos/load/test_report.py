"""What a run adds up to, and what of it is on disk at any time."""

from __future__ import annotations

import csv
import json
import math
import pickle
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from chaos.load.page import late
from chaos.load.plan import Plan, PlanError
from chaos.load.reading import Reading
from chaos.load.recorder import Recorder
from chaos.load.report import Report
from chaos.load.slo import Slo, SloError
from chaos.load.timeline import BINS, Timeline
from tests.disks import mounted


def reading(number: int = 0, **given: Any) -> Reading:
    values: dict[str, Any] = {"outcome": "read", "first_token_s": 0.2, "duration_s": 1.0, "tokens": 5}
    at = float(number)
    return Reading(intended=at, started=at + 0.1, gaps=[0.2] * 4, **(values | given))


def test_failed_cut_and_unfinished_requests_stay_apart() -> None:
    report = Report()
    report.extend(
        [
            reading(),
            reading(outcome="failed", error="400 bad", duration_s=9, first_token_s=None),
            reading(outcome="failed", error="stream: engine_lost", duration_s=2),
            reading(outcome="shed", error="429 queue_full", first_token_s=None),
            reading(outcome="left", left="unreadable", duration_s=5),
            reading(outcome="left", left="impatient", duration_s=6, first_token_s=None),
            reading(outcome="ended"),
        ]
    )
    summary = report.summary()
    assert summary["outcomes"] == {"read": 1, "failed": 2, "shed": 1, "left": 2, "ended": 1}
    assert summary["errors"] == {"400 bad": 1, "stream: engine_lost": 1}
    assert (summary["end_to_end_s"]["count"], summary["end_to_end_s"]["max"]) == (1, pytest.approx(1.1))
    assert (summary["failed_after_s"]["max"], summary["cut_after_s"]["max"]) == (9, 6)
    assert summary["first_token_s"]["count"] == 3
    assert summary["left_because"] == {"unreadable": 1, "impatient": 1}
    assert summary["left_before_first_token"] == 1
    assert summary["goodput"]["share"] == pytest.approx(1 / 6)  # the end of the run is nobody's fault


def test_times_count_from_the_intended_start() -> None:
    report = Report()
    report.add(Reading(intended=0, started=3, first_token_s=0.5, duration_s=1, outcome="read", tokens=1))
    summary = report.summary()
    assert summary["first_token_s"]["max"] == pytest.approx(3.5)
    assert summary["end_to_end_s"]["max"] == pytest.approx(4)
    assert summary["start_delay_s"]["max"] == pytest.approx(3)


def test_one_count_a_token_and_one_mean_a_request() -> None:
    report = Report()
    report.add(Reading(intended=0, started=0, first_token_s=1, duration_s=3, tokens=9, gaps=[1, 1]))
    report.outcomes.clear()
    report.add(
        Reading(intended=0, started=0, first_token_s=1, duration_s=3, tokens=9, gaps=[1, 1], outcome="read")
    )
    summary = report.summary()
    assert (summary["inter_token_s"]["count"], summary["inter_token_s"]["max"]) == (8, 0.25)
    assert (summary["per_output_token_s"]["count"], summary["per_output_token_s"]["max"]) == (1, 0.25)


@pytest.mark.parametrize(
    ("limits", "missed"),
    [
        ("", []),
        ("ttft=0.31,itl=0.21,tpot=210ms,e2e=1.11", []),
        ("ttft=290ms", ["ttft"]),
        ("itl=0.19", ["itl"]),
        ("tpot=0.19s, e2e=1.09", ["tpot", "e2e"]),
    ],
)
def test_goodput_keeps_every_limit(limits: str, missed: list[str]) -> None:
    report = Report(Slo.parse(limits))
    report.add(reading())
    assert report.summary()["goodput"]["missed"] == dict.fromkeys(missed, 1)
    assert report.good == (not missed)


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=-1", "ttft=inf", "ttft=nan", "speed=1", "ttft=1h"])
def test_a_bad_limit_says_how_one_is_written(text: str) -> None:
    with pytest.raises(SloError, match=r"ttft=0\.8,tpot=50ms"):
        Slo.parse(text)


def test_a_timeline_merges_its_bins_and_loses_nothing() -> None:
    line = Timeline(0.0)
    for number in range(2000):
        line.add(reading(number))
    rows = line.rows()
    assert len(rows) <= BINS and line.width_s == 16
    assert sum(row["due"] for row in rows) == sum(row["sent"] for row in rows) == 2000
    assert sum(row["over"]["read"] for row in rows) == 2000
    assert {row["due"] for row in rows[:-1]} == {16}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"rate": 1.0, "trace": "x"}, "--trace or --rate"),
        ({"burst_rate": 5.0}, "give --rate"),
        ({"rate": 1.0, "burst_rate": 5.0, "burst_s": 30.0}, "does not fit"),
        ({"slo": "x=1"}, "no limit"),
        ({"trace": "/nowhere"}, "cannot read the trace"),
        ({"rate": math.inf}, "rate cannot be inf"),
        ({"seconds": math.inf}, "seconds cannot be inf"),
        ({"patience_s": math.nan}, "patience-s cannot be nan"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Plan(**given).check()


def test_a_plan_travels_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(rate=2.5, slo="ttft=1", trace="a b.csv", count=7)
    for name, value in plan.to_env().items():
        monkeypatch.setenv(name, value)
    assert Plan.from_env() == plan
    monkeypatch.setenv("QUAVER_LOAD_RATE", "fast")
    with pytest.raises(PlanError, match=r"QUAVER_LOAD_.*rate has to be a number"):
        Plan.from_env()


def recorder(folder: Path, **given: Any) -> Recorder:
    return Recorder(Plan(out=str(folder), slo="ttft=0.25", **given), "http://there", 0.0)


def requests(folder: Path) -> list[dict[str, str]]:
    with (folder / "requests.csv").open() as file:
        return list(csv.DictReader(file))


def test_files_are_whole_after_every_save(tmp_path: Path) -> None:
    kept = recorder(tmp_path)
    for number in range(3):
        kept.add(reading(number, error='it said "no",\nand hung up' if number else None))
        assert kept.save()
        rows = requests(tmp_path)
        assert len(rows) == number + 1
        assert json.loads((tmp_path / "readers.json").read_text())["requests"] == number + 1
    assert [row["missed"] for row in rows] == ["ttft"] * 3
    assert float(rows[2]["intended_s"]) == 2 and float(rows[2]["first_token_s"]) == pytest.approx(0.3)
    assert json.loads((tmp_path / "readers.json").read_text())["state"] == "running"
    kept.close("finished")
    assert json.loads((tmp_path / "readers.json").read_text())["state"] == "finished"
    assert len((tmp_path / "readers.csv").read_text().splitlines()) == 8


class Page(HTMLParser):
    """Checks that tags nest, and remembers what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag not in {"meta"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_fetches_nothing(tmp_path: Path) -> None:
    kept = recorder(tmp_path, rate=2.0)
    kept.save()
    for number in range(40):
        kept.add(reading(number, first_token_s=0.1 * (1 + number % 9)))
    kept.add(reading(41, outcome="failed", error="<script>alert(1)</script>"))
    for _ in range(2):
        page = Page()
        page.feed((tmp_path / "readers.html").read_text())
        assert page.open == [] and page.fetched == [] and "script" not in page.seen
        kept.close("stopped by SIGTERM")
    assert page.seen.count("svg") == 8
    assert "stopped by SIGTERM" in (tmp_path / "readers.html").read_text()


def test_memory_does_not_grow_with_requests(tmp_path: Path) -> None:
    kept = recorder(tmp_path)

    def go_on(begin: int, end: int) -> int:
        for number in range(begin, end):
            kept.add(reading(number, request_id=f"r{number}", first_token_s=0.001 * (1 + number % 997)))
            if number % 10_000 == 0:
                kept.save()
        kept.save()
        return len(pickle.dumps(kept))

    assert go_on(0, 10_000) < 200_000
    assert go_on(10_000, 100_000) < 200_000  # the timeline has all its bins by now
    assert len(requests(tmp_path)) == 100_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "256k") as disk:
        yield disk


def test_a_full_disk_is_told_once_and_nothing_is_lost_when_there_is_room_again(small_disk: Path) -> None:
    told: list[str] = []
    kept = Recorder(Plan(out=str(small_disk)), "http://there", 0.0, told.append)
    kept.add(reading(0))
    assert kept.save()
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)
    for number in range(1, 400):
        kept.add(reading(number, request_id="r" * 40))
    assert not kept.save() and not kept.save()
    assert len(told) == 1 and "No space left" in told[0]
    rows = (small_disk / "requests.csv").read_text()
    assert rows.endswith("\n") and len(rows.splitlines()) == 2
    assert json.loads((small_disk / "readers.json").read_text())["requests"] == 1  # the last whole one
    filler.unlink()
    assert kept.close("finished")
    assert len((small_disk / "requests.csv").read_text().splitlines()) == 401
    assert json.loads((small_disk / "readers.json").read_text())["requests"] == 400


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    kept = recorder(tmp_path)
    kept.add(reading(0))
    assert kept.save()
    with pytest.raises(PlanError, match="another run writes to"):
        recorder(tmp_path)
    assert len(requests(tmp_path)) == 1
    kept.close("finished")
    recorder(tmp_path).close("finished")


@pytest.mark.parametrize(("delay_s", "told"), [(0.01, False), (3.0, True)])
def test_a_load_that_falls_behind_says_so(tmp_path: Path, delay_s: float, told: bool) -> None:
    kept = recorder(tmp_path, rate=2.0)
    assert late(kept.summary()) is None
    for number in range(40):
        one = reading(number)
        one.started = one.intended + delay_s
        kept.add(one)
    kept.close("finished")
    assert ("fell behind" in (late(kept.summary()) or "")) is told
    assert ("fell behind" in (tmp_path / "readers.html").read_text()) is told
