"""Read plain CSV and JSON files as Spark reads them, without Spark.

The functions read only files about which there is no doubt: each row is well formed, each value is written as Spark
writes it, and nothing is quoted or escaped in CSV. For any other file they raise `Doubtful`, and the caller takes
Spark.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql import types as t

from cairn.spark_versions import to_arrow_schema
from state_backend.values.zones import Zone

_COMPRESSED = (".gz", ".bz2", ".lz4", ".snappy", ".deflate", ".zst", ".zstd", ".xz")
_INTEGERS: dict[type, int] = {t.ShortType: 15, t.IntegerType: 31, t.LongType: 63}
_DATE = re.compile(r"(?:19[7-9]|20\d)\d-\d\d-\d\d", re.ASCII)
_TIME = re.compile(
    r"((?:19[7-9]|20\d)\d-\d\d-\d\d)[ T]((?:[01]\d|2[0-3]):\d\d:\d\d)(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_MOST_EXACT = 2**53


class Doubtful(Exception):
    """The error for a CSV or JSON file that Spark might read in another way than this module."""


def read_csv(path: Path, schema: t.StructType, zone: Zone, *, header: bool) -> pa.Table:
    """Return the rows of a CSV file; an empty cell is null. Raise `Doubtful` if Spark might read it differently."""
    lines = _lines(path)
    if header and lines and lines.pop(0).split(",") != schema.names:
        raise Doubtful("the header has other names")
    reads = [_reader_of_text(field.dataType, zone) for field in schema.fields]
    rows = []
    for line in lines:
        cells = line.split(",")
        if len(cells) != len(reads) or '"' in line or "\\" in line:
            raise Doubtful(f"the line {line[:40]!r}")
        rows.append([read(cell) if cell else None for read, cell in zip(reads, cells, strict=True)])
    return _table(rows, schema, zone)


def read_json(path: Path, schema: t.StructType, zone: Zone) -> pa.Table:
    """Return the rows of a file of JSON lines. Raise `Doubtful` if Spark might read it differently."""
    reads = {field.name: _reader_of_json(field.dataType, zone) for field in schema.fields}
    lowered = {name.lower() for name in reads}

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) or any(name not in reads and name.lower() in lowered for name in made):
            raise Doubtful("two fields of one name")
        return made

    rows = []
    for line in _lines(path):
        try:
            found = json.loads(line, object_pairs_hook=object_of, parse_constant=_refuse)
        except ValueError as error:
            raise Doubtful(str(error)) from None
        if not isinstance(found, dict):
            raise Doubtful("a line is no object")
        values = ((read, found.get(name)) for name, read in reads.items())
        rows.append([None if value is None else read(value) for read, value in values])
    return _table(rows, schema, zone)


def _lines(path: Path) -> list[str]:
    if path.suffix.lower() in _COMPRESSED:
        raise Doubtful("a compressed file")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise Doubtful(str(error)) from None
    lines = text.removesuffix("\n").split("\n") if text else []
    if text.startswith("\ufeff") or "\r" in text or "\0" in text or not all(line.strip() for line in lines):
        raise Doubtful("line ends or empty lines")
    return lines


def _table(rows: list[list[Any]], schema: t.StructType, zone: Zone) -> pa.Table:
    wanted = to_arrow_schema(schema, zone.name)
    columns = zip(*rows, strict=True) if rows else ((),) * len(wanted)
    try:
        return pa.Table.from_arrays(
            [pa.array([*c], f.type) for c, f in zip(columns, wanted, strict=True)], schema=wanted
        )
    except (pa.ArrowException, UnicodeEncodeError) as error:
        raise Doubtful(str(error)) from None


def _reader_of_text(kind: t.DataType, zone: Zone) -> Callable[[str], Any]:
    if isinstance(kind, t.StringType):
        return str
    if (bits := _INTEGERS.get(type(kind))) is not None:
        return lambda text: _integer(int(text) if re.fullmatch(r"-?\d{1,19}", text, re.ASCII) else None, bits)
    if isinstance(kind, t.DoubleType):
        return lambda text: float(_matching(r"-?\d+(\.\d+)?", text))
    if isinstance(kind, t.BooleanType):
        return lambda text: _matching("true|false", text) == "true"
    return _reader_of_time(kind, zone)


def _reader_of_json(kind: t.DataType, zone: Zone) -> Callable[[Any], Any]:
    if isinstance(kind, t.StringType):
        return lambda value: _of(str, value)
    if (bits := _INTEGERS.get(type(kind))) is not None:
        return lambda value: _integer(_of(int, value), bits)
    if isinstance(kind, t.DoubleType):
        return _double
    if isinstance(kind, t.BooleanType):
        return lambda value: _of(bool, value)
    read = _reader_of_time(kind, zone)
    return lambda value: read(_of(str, value))


def _reader_of_time(kind: t.DataType, zone: Zone) -> Callable[[str], Any]:
    if isinstance(kind, t.DateType):
        return lambda text: _valid(lambda: date.fromisoformat(_matching(_DATE, text)))
    if not isinstance(kind, t.TimestampType):
        raise Doubtful(f"a column of type {kind.simpleString()}")

    def read(text: str) -> datetime:
        found = _TIME.fullmatch(text)
        if found is None:
            raise Doubtful(f"the time {text[:40]!r}")
        day, time, fraction, offset = found.groups()
        at = _valid(lambda: datetime.fromisoformat(f"{day}T{time}{(fraction or '.0')[:7].ljust(7, '0')}{offset or ''}"))
        local: datetime = at if offset else at.replace(tzinfo=zone.rules)
        return local

    return read


def _valid(made: Callable[[], Any]) -> Any:
    try:
        return made()
    except ValueError as error:
        raise Doubtful(str(error)) from None


def _matching(pattern: str | re.Pattern[str], text: str) -> str:
    if re.fullmatch(pattern, text) is None or not text.isascii():
        raise Doubtful(f"the value {text[:40]!r}")
    return text


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise Doubtful(f"the value {str(value)[:40]!r}")
    return value


def _integer(value: int | None, bits: int) -> int:
    if value is None or not -(2**bits) <= value < 2**bits:
        raise Doubtful(f"the number {value}")
    return value


def _double(value: Any) -> float:
    exact = type(value) is float and math.isfinite(value)
    if not exact and not (type(value) is int and abs(value) <= _MOST_EXACT):
        raise Doubtful(f"the value {str(value)[:40]!r}")
    return float(value)


def _refuse(constant: str) -> NoReturn:
    raise Doubtful(constant)
