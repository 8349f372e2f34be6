"""The journal on a disk that is really full."""

import json

import pytest

from chaos.journal import Journal, JournalError
from tests.disks import mounted


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", "64k", lazily=True) as disk:
        yield disk


def test_a_write_that_does_not_fit_leaves_no_half_line(small_disk):
    journal = Journal(small_disk / "journal.jsonl")
    journal.append("start", fault_id="a")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(b"x" * 4096) == 4096:
            pass
        raise OSError
    with pytest.raises(JournalError, match="cannot be written"):
        for number in range(60):
            journal.append("start", fault_id=f"long-{number}", params={"x": "y" * 200})
    assert "unwritten" in journal.remember("end", fault_id="b", reason="z" * 4096)
    filler.unlink()
    journal.append("end", fault_id="a")
    lines = journal.path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines][::-1][0] == "end"
    journal.close()
    again = Journal(small_disk / "journal.jsonl")
    assert "a" not in again.lost_leases
    again.close()


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": 5, "time": 1}',
        b'{"event": "start", "time": 1}',
        b'{"event": "start", "fault_id": [1], "time": 1}',
        b'{"event": "note", "text": "undated"}',
        b'{"event": "note", "time": "now"}',
        b'{"event": "note", "time": NaN}',
        b'{"event": "note", "time": 1e300}',
        b"[1]",
        b"\xff\xfe",
    ],
)
def test_an_entry_that_nobody_could_tell_counts_as_unreadable(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line + b'\n{"event": "halt", "time": 1, "reason": "by me"}\n')
    journal = Journal(path)
    journal.recover()
    assert journal.halted == "by me"
    halt, recovery = journal.recent
    assert (halt["event"], recovery["event"], recovery["unreadable_lines"]) == ("halt", "recovery", 1)
    journal.close()


def test_a_journal_that_was_deleted_takes_nothing(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append("start", fault_id="a")
    journal.path.unlink()
    with pytest.raises(JournalError, match="was deleted; restart the server"):
        journal.append("start", fault_id="b")
    assert "was deleted" in journal.remember("halt", reason="by me")["unwritten"]
    journal.close()
