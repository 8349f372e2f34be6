"""When requests are due, fixed before any answer: Poisson, bursts, or a trace that was recorded.

Every source yields arrivals in order, seconds after the start, one at a time and without end (a trace
ends). None of them knows how the server does: a slow one meets the same arrivals as a fast one.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TextIO

_TIMES = {"arrival_s": 1.0, "timestamp": 1e-3, "TIMESTAMP": 1.0}  # seconds of one unit
_PROMPTS = ("prompt_tokens", "input_length", "ContextTokens")
_MOST_TOKENS = 10_000_000  # of one request: a prompt of that length can still be written
_OUTPUTS = ("output_tokens", "output_length", "GeneratedTokens")


class TraceError(ValueError):
    """A trace that cannot be replayed; the message names file, line and what is expected."""


@dataclass(frozen=True)
class Arrival:
    """One request that is due `at_s` seconds after the start, with the lengths a trace asks for."""

    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def poisson(rate: float, rng: random.Random) -> Iterator[Arrival]:
    """Yield arrivals of a Poisson process of `rate` a second."""
    due = 0.0
    while True:
        due += rng.expovariate(rate)
        yield Arrival(due)


def bursts(
    rate: float, burst_rate: float, burst_s: float, every_s: float, rng: random.Random
) -> Iterator[Arrival]:
    """Yield a Poisson process whose rate is `burst_rate` in the last `burst_s` of each `every_s`.

    Unit exponential gaps are stretched by the rate in force, piece by piece, so that the process is exact
    at the edges too. Raises ValueError unless 0 < burst_s < every_s.
    """
    if not 0 < burst_s < every_s:
        raise ValueError(f"a burst of {burst_s:g} s does not fit into every {every_s:g} s")
    pieces = ((every_s - burst_s, rate), (burst_s, burst_rate))
    begin, wanted = 0.0, rng.expovariate(1.0)
    while True:
        for length, pace in pieces:
            place = 0.0
            while wanted <= (length - place) * pace:
                place += wanted / pace
                yield Arrival(begin + place)
                wanted = rng.expovariate(1.0)
            wanted -= (length - place) * pace
            begin += length


def replay(path: Path, speed: float = 1.0) -> Iterator[Arrival]:
    """Yield the arrivals of a trace, the first at 0, `speed` times as fast.

    A CSV file with a header, or JSON lines, read as it goes: `arrival_s` and, where lengths are known,
    `prompt_tokens` and `output_tokens`. The columns of two published traces are understood as they are:
    `timestamp` (ms), `input_length`, `output_length`, and `TIMESTAMP` (a date), `ContextTokens`,
    `GeneratedTokens`. Raises TraceError, at once for a file that cannot be read.
    """
    try:
        file = path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from None
    return _arrivals(file, path, speed)


def within(arrivals: Iterable[Arrival], seconds: float, count: int) -> Iterator[Arrival]:
    """Yield at most `count` arrivals, all due within `seconds`."""
    return islice(takewhile(lambda arrival: arrival.at_s < seconds, arrivals), count)


def _arrivals(file: TextIO, path: Path, speed: float) -> Iterator[Arrival]:
    first: float | None = None
    last = 0.0
    with file:
        for number, row in _rows(file, path):
            try:
                time_s = _time(row)
                first = time_s if first is None else first
                at_s = (time_s - first) / speed
                arrival = Arrival(at_s, _length(row, _PROMPTS), _length(row, _OUTPUTS))
            except (KeyError, ValueError, OverflowError) as error:
                raise TraceError(f"{path}, line {number}: {error.args[0]}") from None
            if at_s < last:
                raise TraceError(f"{path}, line {number}: arrives before the line above; sort it by time")
            last = at_s
            yield arrival
    if first is None:
        raise TraceError(f"{path} holds no arrivals")


def _rows(file: TextIO, path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line number, row) of JSON lines where the file begins with a brace, else of CSV."""
    try:
        begin = file.read(1)
        file.seek(0)
        if begin != "{":
            reader = csv.DictReader(file)
            yield from ((reader.line_num, row) for row in reader)
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TraceError(f"{path}, line {number}: not an object of named values")
                yield number, row
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {number}: not JSON ({error.msg})") from None
    except (csv.Error, RecursionError, OSError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from None


def _time(row: Mapping[str, Any]) -> float:
    for name, unit_s in _TIMES.items():
        if (value := row.get(name)) not in (None, ""):
            seconds = _number(name, value) * unit_s
            if not math.isfinite(seconds):
                raise ValueError(f"{name} is {value}")
            return seconds
    raise KeyError("no arrival_s; a trace has the columns arrival_s, prompt_tokens, output_tokens")


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError):
        pass
    try:
        return datetime.fromisoformat(value).timestamp()
    except (ValueError, TypeError):
        raise ValueError(f"{name} is {value!r}, neither a number nor a date") from None


def _length(row: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if row.get(name) not in (None, "")), None)
    if name is None:
        return None
    try:
        length = int(row[name])
    except (ValueError, TypeError, OverflowError):
        length = 0
    if not 0 < length <= _MOST_TOKENS:
        raise ValueError(f"{name} is {row[name]!r}, not a number of tokens from 1 to {_MOST_TOKENS}")
    return length
