from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from telemetry import query, segments
from telemetry.columns import decode
from telemetry.hub import Telemetry
from telemetry.record import SCHEMA_VERSION, TABLES
from telemetry.records import Records, RecordsInUseError
from telemetry.settings import TelemetrySettings

from .conftest import Clock, Events

CHILD = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from conftest import Clock, Events
    from telemetry.hub import Telemetry
    from telemetry.settings import TelemetrySettings
    clock = Clock()
    events = Events(clock)
    settings = TelemetrySettings(records_dir=Path(sys.argv[2]), records_flush_s=0.05)
    telemetry = Telemetry(settings, clock=clock)
"""


def child(code: str, folder: Path) -> subprocess.Popen[str]:
    script = textwrap.dedent(CHILD) + textwrap.dedent(code)
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def record(folder: Path, changes: dict[str, Any] | None = None) -> tuple[Records, Counter[str]]:
    dropped: Counter[str] = Counter()
    settings = TelemetrySettings(records_dir=folder, records_flush_s=0.02).model_copy(update=changes or {})
    return Records(settings, lambda what, n=1: dropped.update({what: n})), dropped


def test_a_killed_process_leaves_everything_flushed(tmp_path: Path) -> None:
    process = child(
        """
        for number in range(20):
            events.run(telemetry, f"r{number}", tokens=5)
        assert telemetry.writer.flush()
        print("flushed", flush=True)
        number = 20
        while True:
            events.run(telemetry, f"r{number}", tokens=5)
            number += 1
        """,
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "flushed\n"
    time.sleep(0.2)  # more is written meanwhile, so that the kill lands in mid-write
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    count = "SELECT count(*) AS n, count(DISTINCT request_id) AS ids FROM requests"
    before = query.select(tmp_path, count)[0]
    assert before["n"] >= 20
    assert query.request(tmp_path, "r19") is not None
    tokens = query.select(tmp_path, "SELECT count(*) AS n FROM tokens WHERE request_id = 'r7'")
    assert tokens == [{"n": 5}]

    records, dropped = record(tmp_path)
    records.close()
    assert not list(tmp_path.glob("*/*.arrows"))
    assert query.select(tmp_path, count) == [before]
    assert not dropped


def test_a_segment_is_readable_wherever_it_is_cut(tmp_path: Path, events: Events) -> None:
    records, _ = record(tmp_path)
    for index in range(3):
        records.put_step(decode(events.step([("r1", 0)], index, detail=[0]), capture=False))
        records.flush()
    path = segments.live(tmp_path, "tokens")[0]
    whole = path.read_bytes()
    records.close()
    copy = tmp_path / "copy.arrows"
    seen = set()
    for cut in [*range(0, len(whole), 40), len(whole)]:
        copy.write_bytes(whole[:cut])
        table = segments.read_live(copy)
        seen.add(-1 if table is None else table.num_rows)
    assert seen == {-1, 0, 1, 2, 3}


def test_rotation_keeps_every_row_once(tmp_path: Path, events: Events) -> None:
    records, dropped = record(tmp_path, {"records_rotate_mb": 1e-6})
    for index in range(12):
        records.put_step(decode(events.step([("r1", 0)], index, detail=[0]), capture=False))
        records.flush()
        rows = query.select(tmp_path, "SELECT count(*) AS n, count(DISTINCT step) AS steps FROM tokens")
        assert rows == [{"n": index + 1, "steps": index + 1}]
    records.close()
    files = segments.rotated(tmp_path, "tokens")
    assert len(files) == 12
    assert not list(tmp_path.glob("*/*.part"))
    schema = pq.read_schema(files[0])
    assert schema.metadata[b"schema_version"] == SCHEMA_VERSION.encode()
    assert schema.names == TABLES["tokens"].names
    assert not dropped


def test_the_cap_on_size_takes_the_oldest(tmp_path: Path, events: Events) -> None:
    records, _ = record(tmp_path, {"records_rotate_mb": 1e-6, "records_max_mb": 0.02})
    for index in range(30):
        records.put_step(decode(events.step([("r1", 0)], index), capture=False))
        records.flush()
    records.close()
    total = sum(path.stat().st_size for path in tmp_path.glob("*/*.parquet"))
    assert 0 < total <= 0.02 * (1 << 20)
    kept = [row["step"] for row in query.select(tmp_path, "SELECT step FROM tokens ORDER BY step")]
    assert kept == list(range(30 - len(kept), 30))


def test_the_cap_on_age_takes_old_files(tmp_path: Path, events: Events) -> None:
    records, _ = record(tmp_path)
    records.put_step(decode(events.step([("old", 0)], 0), capture=False))
    records.close()
    path = segments.rotated(tmp_path, "tokens")[0]
    name = f"{time.time_ns() - 2 * 3_600_000_000_000:020d}-1.parquet"
    path.rename(path.with_name(name))
    foreign = tmp_path / "tokens" / "notes.parquet"
    foreign.touch()
    records, _ = record(tmp_path, {"records_max_age_h": 1})
    records.put_step(decode(events.step([("new", 0)], 0), capture=False))
    records.close()
    assert query.select(tmp_path, "SELECT request_id FROM tokens") == [{"request_id": "new"}]
    assert foreign.exists()


def test_only_detail_is_dropped_and_every_drop_is_counted(tmp_path: Path, events: Events) -> None:
    records, dropped = record(tmp_path, {"records_queue": 8, "records_flush_s": 30.0})
    held = threading.Event()
    write, records._write = records._write, lambda: held.wait(10)  # a disk that takes its time
    records._wake.set()
    for index in range(50):
        records.put_step(decode(events.step([("r1", 0), ("r2", 0)], index, detail=[1]), capture=False))
        records.put_request(row(f"q{index}"))
    records._write = write
    held.set()
    records.close()
    assert query.select(tmp_path, "SELECT count(*) AS n FROM requests") == [{"n": 50}]
    written = query.select(tmp_path, "SELECT count(*) AS n FROM tokens")[0]["n"]
    assert written + dropped["tokens"] == 100
    assert written == 16
    assert dropped["layers"] == 42
    assert dropped["requests"] == 0


def test_a_full_disk_is_survived(tmp_path: Path) -> None:
    """The file size limit of the kernel stands in for a full disk: writes fail half-way."""
    process = child(
        """
        import json, logging, resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        errors = []
        handler = logging.Handler()
        handler.emit = lambda record: errors.append(record.getMessage())
        logging.getLogger("telemetry.records").addHandler(handler)
        dropped = lambda what: telemetry.registry.get_sample_value(
            "quaver_telemetry_dropped_total", {"what": what}
        )
        def turn(name):
            for number in range(10):
                events.run(telemetry, f"{name}{number}", tokens=20)
            assert telemetry.writer.flush()
        turn("before")
        limit = max(path.stat().st_size for path in telemetry.writer.folder.glob("*/*.arrows")) + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        for _ in range(8):
            turn("full")
        lost = dropped("tokens")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        turn("after")
        telemetry.close()
        print(json.dumps({"lost": lost, "in_the_end": dropped("tokens"), "requests": dropped("requests"),
                          "errors": len(errors)}))
        """,
        tmp_path,
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    told = json.loads(output)
    assert told["lost"] > 0
    assert told["lost"] == told["in_the_end"]
    assert told["requests"] == 0
    rows = query.select(tmp_path, "SELECT count(*) AS n FROM requests")[0]["n"]
    assert rows == 100
    tokens = query.select(tmp_path, "SELECT count(*) AS n FROM tokens")[0]["n"]
    assert tokens + told["lost"] == 100 * 20
    after = "SELECT count(*) AS n FROM tokens WHERE request_id LIKE 'after%'"
    assert query.select(tmp_path, after) == [{"n": 200}]
    assert told["errors"] <= len(TABLES)  # once an outage, not every batch


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    records, _ = record(tmp_path)
    with pytest.raises(RecordsInUseError, match="QUAVER_RECORDS_DIR"):
        record(tmp_path)
    records.close()
    record(tmp_path)[0].close()


def test_absent_is_null_and_halves_come_back(tmp_path: Path, events: Events) -> None:
    signals = np.array([[0.5, np.nan, 0.3, np.nan, np.nan, 0.5, np.nan]])
    nothing = np.full((1, 3), np.nan, "<f2").tobytes()
    records, _ = record(tmp_path)
    records.put_step(decode(events.step([("r1", 0)], 0, signals, detail=[0], lens_entropy=nothing), False))
    for state in ("live", "parquet"):
        records.flush() if state == "live" else records.close()
        token = query.select(tmp_path, "SELECT * FROM tokens")[0]
        assert token["surprisal"] == 0.5
        for name in ("confidence", "rank", "entropy", "entropy_post", "token_id", "text"):
            assert token[name] is None
        layer = query.select(tmp_path, "SELECT * FROM layers")[0]
        assert layer["lens_entropy"] is None
        assert layer["head_kl"] == [0, 1, 2, 3, 4, 5]
        assert layer["lookback"] == [24, 25, 26, 27, 28, 29]


def test_closing_loses_nothing(settings: TelemetrySettings, events: Events, clock: Clock) -> None:
    telemetry = Telemetry(settings.model_copy(update={"records_flush_s": 60.0}), clock=clock)
    for number in range(30):
        events.run(telemetry, f"r{number}", tokens=4)
    telemetry.close()
    telemetry.close()
    assert query.select(settings.records_dir, "SELECT count(*) AS n FROM tokens") == [{"n": 120}]
    assert query.select(settings.records_dir, "SELECT count(*) AS n FROM requests") == [{"n": 30}]
    assert "quaver-records" not in {thread.name for thread in threading.enumerate()}


def row(request_id: str) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    return {
        "request_id": request_id,
        "tenant": "t",
        "route": "r",
        "canary": False,
        "endpoint": "chat",
        "stream": False,
        "model": "m",
        "started": now,
        "ended": now,
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "duration_s": 0.1,
        "finish_reason": "stop",
        "disconnected": False,
    }
