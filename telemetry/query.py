"""DuckDB over the records: Parquet files and live segments together, read-only, local files only."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from engine.messages import HEAD_SIGNALS
from telemetry import segments
from telemetry.columns import finite
from telemetry.record import TABLES

log = logging.getLogger(__name__)

MAX_ROWS = 1000
_SELECT = duckdb.StatementType.SELECT
_LAST_SECOND = 253402300799.0  # of the year 9999
T = TypeVar("T")


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """Return a connection with the views `tokens`, `layers` and `requests`.

    Works beside a running server and after a crash. The connection can read the records folder
    and nothing else; its settings are locked.
    """
    folder = folder.expanduser()
    connection = duckdb.connect(":memory:", config={"threads": 1, "memory_limit": "512MB"})
    connection.execute("SET TimeZone = 'UTC'")
    for name in TABLES:
        _view(connection, folder, name)
    connection.execute(f"SET allowed_directories = [{_quote(folder)}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def select(folder: Path, sql: str, parameters: list[Any] | None = None) -> list[dict[str, Any]]:
    """Run one query and return its rows; times are unix seconds, NaN is None.

    Raises duckdb.Error when the query is wrong, ValueError when it is more than a query.
    """

    def run(connection: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
        # What may be read may be written as well, as far as DuckDB's own limits go.
        if {statement.type for statement in connection.extract_statements(sql)} != {_SELECT}:
            raise ValueError("only SELECT statements can be run on the records")
        return _rows(connection, sql, parameters)

    return _retry(folder, run)


def requests(
    folder: Path, limit: int = 100, route: str | None = None, since: float | None = None
) -> list[dict[str, Any]]:
    """Request records, newest first: at most `limit`, of one route, ended after `since` (unix seconds)."""
    since = None if since is None else min(max(since, 0.0), _LAST_SECOND)
    sql = """SELECT * FROM requests
        WHERE ($1 IS NULL OR route = $1) AND ($2 IS NULL OR ended > to_timestamp($2))
        ORDER BY ended DESC LIMIT $3"""
    return select(folder, sql, [route, since, max(1, min(limit, MAX_ROWS))])


def request(folder: Path, request_id: str) -> dict[str, Any] | None:
    """One request with its tokens (columns as lists) and layers; None when it is not recorded."""

    def find(connection: duckdb.DuckDBPyConnection) -> dict[str, Any] | None:
        key = [request_id]
        head = _rows(connection, "SELECT * FROM requests WHERE request_id = $1", key)
        if not head:
            return None
        tokens = _rows(connection, "SELECT * FROM tokens WHERE request_id = $1 ORDER BY choice, step", key)
        detail = _rows(connection, "SELECT * FROM layers WHERE request_id = $1 ORDER BY choice, step", key)
        columns = {name: [row[name] for row in tokens] for name in TABLES["tokens"].names[1:]}
        return {"request": head[0], "tokens": columns, "layers": _layers(detail)}

    return _retry(folder, find)


def _retry(folder: Path, run: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
    """Run on a fresh connection; once more when a file was retired in between."""
    try:
        with connect(folder) as connection:
            return run(connection)
    except duckdb.IOException:
        with connect(folder) as connection:
            return run(connection)


def _rows(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: list[Any] | None
) -> list[dict[str, Any]]:
    connection.execute(sql, parameters or [])
    names = [column[0] for column in connection.description or []]
    return [
        {name: _plain(value) for name, value in zip(names, row, strict=True)} for row in connection.fetchall()
    ]


def _layers(detail: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows with their own layers, head columns as [layer][head]; `layers` are those of any row."""
    rows = []
    for row in detail:
        heads = row["heads"]
        shaped = {name: value for name, value in row.items() if name not in ("request_id", "heads")}
        for name in HEAD_SIGNALS:
            flat = row[name]
            if flat is not None:
                shaped[name] = [flat[at : at + heads] for at in range(0, len(flat), heads)]
        rows.append(shaped)
    return {
        "layers": sorted({layer for row in detail for layer in row["layers"]}),
        "heads": detail[0]["heads"] if detail else 0,
        "rows": rows,
    }


def _view(connection: duckdb.DuckDBPyConnection, folder: Path, name: str) -> None:
    """Live segments are read now; one that is rotated meanwhile is not read again as Parquet."""
    schema = pa.schema([_readable(field) for field in TABLES[name]])
    live = {
        path.stem: table
        for path in segments.live(folder, name)
        if (table := segments.read_live(path)) is not None
    }
    tables = [_as_now(table, schema) for table in live.values()]
    connection.register(f"live_{name}", pa.concat_tables([schema.empty_table(), *tables]))
    files = [path for path in segments.rotated(folder, name) if path.stem not in live]
    try:
        _create(connection, name, files)
    except duckdb.Error:
        whole = [path for path in files if segments.is_whole(path)]
        for path in set(files).difference(whole):
            log.warning("records: %s is damaged and left out", path)
        _create(connection, name, whole)


def _as_now(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a segment, perhaps of an older version, in today's schema: what it lacks is null."""
    for field in schema:
        if field.name not in table.schema.names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names).cast(schema)


def _create(connection: duckdb.DuckDBPyConnection, name: str, files: list[Path]) -> None:
    listed = ", ".join(_quote(path) for path in files)
    parquet = f"SELECT * FROM read_parquet([{listed}], union_by_name = true) UNION ALL BY NAME "  # noqa: S608 - our files
    connection.execute(f"CREATE VIEW {name} AS {parquet if files else ''}SELECT * FROM live_{name}")  # noqa: S608


def _readable(field: pa.Field) -> pa.Field:
    """DuckDB reads float16 from Parquet but not from Arrow."""
    if pa.types.is_list(field.type) and pa.types.is_float16(field.type.value_type):
        return pa.field(field.name, pa.list_(pa.float32()))
    return pa.field(field.name, field.type)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.timestamp()
    return finite(value)


def _quote(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
