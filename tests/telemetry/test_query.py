from __future__ import annotations

import threading
from pathlib import Path

import duckdb
import pytest

from telemetry import query
from telemetry.hub import Telemetry
from telemetry.settings import TelemetrySettings

from .conftest import START, Clock, Events


@pytest.fixture
def folder(telemetry: Telemetry, events: Events) -> Path:
    for number in range(5):
        events.clock.now = START + number
        events.run(telemetry, f"r{number}", meta={"route": "qa" if number % 2 else "list"})
    telemetry.alert_raised("r0", "late")
    telemetry.writer.flush()
    return telemetry.settings.records_dir


def test_requests_come_newest_first(folder: Path) -> None:
    assert [row["request_id"] for row in query.requests(folder)] == ["r4", "r3", "r2", "r1", "r0"]
    assert [row["request_id"] for row in query.requests(folder, limit=2)] == ["r4", "r3"]
    assert [row["request_id"] for row in query.requests(folder, route="qa")] == ["r3", "r1"]
    assert [row["request_id"] for row in query.requests(folder, since=START + 3)] == ["r4", "r3"]
    assert len(query.requests(folder, limit=-5)) == 1


def test_times_are_unix_seconds(folder: Path) -> None:
    row = query.requests(folder, limit=1)[0]
    assert row["started"] == pytest.approx(START + 4)
    assert row["ended"] == pytest.approx(START + 4.3)
    assert row["aggregates"] == {"mean_confidence": pytest.approx(0.6)}


def test_one_request_with_its_detail(folder: Path) -> None:
    found = query.request(folder, "r2")
    assert found is not None
    assert found["tokens"]["step"] == [0, 1, 2]
    assert found["tokens"]["entropy"] == [1.5] * 3
    assert found["layers"]["layers"] == [0, 1, 2]
    assert found["layers"]["heads"] == 2
    first = found["layers"]["rows"][0]
    assert first["lens_entropy"] == [2.5] * 3
    assert first["head_kl"] == [[0, 1], [2, 3], [4, 5]]
    assert query.request(folder, "r2' OR '1'='1") is None


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/passwd')",
        "COPY (SELECT 1) TO '/tmp/quaver-query-escape.csv'",
        "SET enable_external_access = true",
        "INSTALL httpfs",
    ],
)
def test_sql_reaches_nothing_but_the_records(folder: Path, sql: str) -> None:
    with query.connect(folder) as connection, pytest.raises(duckdb.Error):
        connection.execute(sql)
    with pytest.raises((duckdb.Error, ValueError)):
        query.select(folder, sql)


def test_reading_while_segments_rotate(settings: TelemetrySettings, events: Events, clock: Clock) -> None:
    """A reader sees each row once, and never fewer than before."""
    telemetry = Telemetry(
        settings.model_copy(update={"records_rotate_mb": 1e-6, "records_flush_s": 0.005}), clock=clock
    )
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            events.run(telemetry, f"r{number}", tokens=1)
            number += 1
            stop.wait(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = 0
        for _ in range(4):
            row = query.select(
                settings.records_dir, "SELECT count(*) AS n, count(DISTINCT request_id) AS ids FROM requests"
            )[0]
            assert row["n"] == row["ids"] >= last
            last = row["n"]
    finally:
        stop.set()
        writer.join()
        telemetry.close()


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 1) TO '{}/requests/escape.parquet'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{}/requests/escape.parquet'",
        "SELECT 1; COPY (SELECT 1) TO '{}/requests/escape.parquet'",
        "DROP VIEW requests",
        "",
    ],
)
def test_sql_writes_nothing(folder: Path, sql: str) -> None:
    with pytest.raises(ValueError, match="only SELECT"):
        query.select(folder, sql.format(folder))
    assert not list(folder.glob("*/escape*"))


def test_describing_is_reading(folder: Path) -> None:
    assert {row["name"] for row in query.select(folder, "SHOW TABLES")} >= {"requests", "tokens", "layers"}
    assert query.select(folder, "WITH r AS (FROM requests) SELECT count(*) AS n FROM r") == [{"n": 5}]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_damaged_file_is_left_out(
    folder: Path, telemetry: Telemetry, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    telemetry.close()
    (folder / "requests" / f"{1:020d}-1.parquet").write_bytes(content)
    assert [row["request_id"] for row in query.requests(folder)] == ["r4", "r3", "r2", "r1", "r0"]
    assert "is damaged" in caplog.text


def test_an_empty_folder_has_empty_tables(tmp_path: Path) -> None:
    assert query.requests(tmp_path) == []
    assert query.select(tmp_path, "SELECT count(*) AS n FROM layers") == [{"n": 0}]
