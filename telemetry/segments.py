"""Files of one record table: a live Arrow IPC stream that grows, Parquet once it is rotated.

A live segment is a sequence of whole IPC messages appended to a file, so that whatever was
written is readable after `kill -9`, up to the last complete batch. Rotation writes the Parquet
file beside it, renames it into place, and only then removes the segment; a segment whose Parquet
file exists is a leftover.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LIVE, PARQUET = ".arrows", ".parquet"
_OURS = "[0-9]" * 20 + "-*"  # files of other names are left alone


def read_live(path: Path) -> pa.Table | None:
    """Read a live segment up to its last complete batch; None when not even the schema is there."""
    batches: list[pa.RecordBatch] = []
    try:
        with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as reader:
            schema = reader.schema
            while True:
                try:
                    batches.append(reader.read_next_batch())
                except (StopIteration, OSError, pa.ArrowInvalid):
                    return pa.Table.from_batches(batches, schema)
    except (OSError, pa.ArrowInvalid):
        return None


def rotated(folder: Path, table: str) -> list[Path]:
    """Parquet files of a table, oldest first."""
    return sorted((folder / table).glob(f"{_OURS}{PARQUET}"))


def is_whole(path: Path) -> bool:
    """Say whether a Parquet file has its footer; a power cut may leave one without."""
    try:
        pq.read_metadata(path)
    except (OSError, pa.ArrowInvalid):
        return False
    return True


def live(folder: Path, table: str) -> list[Path]:
    """Live segments of a table whose Parquet file does not exist yet, oldest first."""
    segments = sorted((folder / table).glob(f"{_OURS}{LIVE}"))
    return [path for path in segments if not path.with_suffix(PARQUET).exists()]


def convert(path: Path) -> int:
    """Turn a live segment into Parquet, atomically, and remove it. Returns its rows."""
    target = path.with_suffix(PARQUET)
    rows = 0
    if not target.exists():
        table = read_live(path)
        if table is not None and table.num_rows:
            part = target.with_suffix(".part")
            pq.write_table(table, part, compression="zstd")
            part.replace(target)
            rows = table.num_rows
    path.unlink(missing_ok=True)
    return rows


class Segment:
    """The live segment of one table. Not thread safe: the writer thread owns it."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.folder, self.schema = folder, schema
        self.path: Path | None = None
        self.size = 0
        self.born = 0.0
        self._file = -1

    def append(self, batch: pa.RecordBatch) -> None:
        """Write one batch whole, or not at all: on OSError the file is cut back to what it was."""
        if self.path is None:
            self._open()
        self._write(batch.serialize())

    def rotate(self) -> int:
        """Close the segment and turn it into Parquet. Returns its rows."""
        path = self.path
        if path is None:
            return 0
        os.close(self._file)
        self.path, self._file = None, -1
        return convert(path)

    def _open(self) -> None:
        path = self.folder / f"{time.time_ns():020d}-{os.getpid()}{LIVE}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.path, self.size, self.born = path, 0, time.monotonic()
        try:
            self._write(self.schema.serialize())
        except OSError:
            os.close(self._file)
            self.path, self._file = None, -1
            path.unlink(missing_ok=True)
            raise

    def _write(self, message: pa.Buffer) -> None:
        view = memoryview(message)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += message.size


def sizes(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """Name, path and bytes of every record file, oldest first by name."""
    files = [path for pattern in (f"*/{_OURS}{LIVE}", f"*/{_OURS}{PARQUET}") for path in folder.glob(pattern)]
    for path in sorted(files, key=lambda path: path.name):
        try:
            yield path.name, path, path.stat().st_size
        except FileNotFoundError:
            continue
