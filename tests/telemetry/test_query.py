from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from quaver.cli.records import app as records
from telemetry import query, segments
from telemetry.hub import Telemetry
from telemetry.record import LAYERS
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


def test_the_command_lists_canaries_apart(folder: Path, telemetry: Telemetry, events: Events) -> None:
    events.run(telemetry, "asked-by-the-server", meta={"canary": True})
    telemetry.writer.flush()

    def listed(*options: str) -> list[str]:
        shown = CliRunner().invoke(records, ["query", "--dir", str(folder), "--json", *options])
        assert shown.exit_code == 0
        return [json.loads(line)["request_id"] for line in shown.stdout.splitlines()]

    assert listed() == ["r4", "r3", "r2", "r1", "r0"]
    assert listed("--canaries") == ["asked-by-the-server"]
    assert len(listed("SELECT request_id FROM requests")) == 6


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
    assert (first["reason"], first["rate"], first["stride"]) == ("floor", 0.125, 4)
    assert query.request(folder, "r2' OR '1'='1") is None


def test_layers_of_a_request_are_those_of_all_its_tokens(
    make: Callable[..., Telemetry], events: Events
) -> None:
    telemetry = make()
    meta = events.meta("r1")
    telemetry.on_started(events.started(meta))
    for index, layers in enumerate(([0, 4, 9], [2, 9])):
        shape = {"layers": len(layers), "detail": [0]}
        step = events.step([("r1", 0)], index, **shape)
        telemetry.on_step(msgspec.structs.replace(step, layers=layers))
    telemetry.on_ended(events.ended(meta))
    telemetry.writer.flush()
    found = query.request(telemetry.settings.records_dir, "r1")
    assert found is not None
    assert found["layers"]["layers"] == [0, 2, 4, 9]
    assert [row["layers"] for row in found["layers"]["rows"]] == [[0, 4, 9], [2, 9]]
    assert found["layers"]["rows"][1]["head_kl"] == [[0, 1], [2, 3]]


def test_where_a_prompt_came_from_is_recorded(telemetry: Telemetry, events: Events) -> None:
    events.run(telemetry, "r1", tier_tokens={"device": 3, "disk": 1}, loading_s=0.25)
    events.run(telemetry, "r2", cached_tokens=None)
    telemetry.writer.flush()
    folder = telemetry.settings.records_dir
    columns = ("kv_hit_device", "kv_hit_host", "kv_hit_disk", "kv_hit_ratio", "kv_wait_s")
    rows = query.select(folder, f"SELECT {', '.join(columns)} FROM requests ORDER BY request_id")
    assert rows[0] == dict(zip(columns, (3, 0, 1, pytest.approx(4 / 7), 0.25), strict=True))
    assert rows[1] == dict.fromkeys(columns)


def test_requests_of_the_third_schema_are_read_too(folder: Path) -> None:
    """They are null where nobody knew what a prompt waited for."""
    before = query.select(folder, "SELECT * FROM requests ORDER BY request_id")
    for path in (folder / "requests").iterdir():
        table = segments.read_live(path)
        assert table is not None
        path.unlink()
        old = table.drop_columns("kv_wait_s").replace_schema_metadata({"schema_version": "3"})
        pq.write_table(old, path.with_suffix(segments.PARQUET))
    after = query.select(folder, "SELECT * FROM requests ORDER BY request_id")
    assert after == [row | {"kv_wait_s": None} for row in before]


@pytest.mark.parametrize("live", [True, False], ids=["live", "parquet"])
def test_records_of_the_first_schema_are_read_too(folder: Path, live: bool) -> None:
    """Nobody knows why these tokens were sampled: null."""
    new = ("reason", "rate", "stride")
    old = pa.schema([field for field in LAYERS if field.name not in new], {"schema_version": "1"})
    values = {
        "request_id": "old",
        "choice": 0,
        "step": 3,
        "layers": [0, 2],
        "heads": 1,
        "head_kl": [0.5, 0.25],
    }
    path = folder / "layers" / f"{0:020d}-1"
    table = pa.Table.from_pylist([dict.fromkeys(old.names) | values], old)
    if live:
        with pa.ipc.new_stream(path.with_suffix(segments.LIVE), old) as writer:
            writer.write_table(table)
    else:
        pq.write_table(table, path.with_suffix(segments.PARQUET))
    rows = query.select(
        folder, "SELECT request_id, head_kl, reason, rate, stride FROM layers ORDER BY reason"
    )
    assert len(rows) > 1
    assert rows[-1] == {"request_id": "old", "head_kl": [0.5, 0.25]} | dict.fromkeys(new)


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
