"""Write a replay as a test: state, rows and the result are literals, so the test needs neither root nor source."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import types as t

from cairn.replay.literal_state import time_of, values_of
from cairn.replay.replay_key import Replay
from cairn.rows.routing import INITIAL, INPUT
from cairn.rows.row_order import unordered
from cairn.spark.ddl import parse_ddl_locally
from state_backend.values.errors import UsageError
from state_backend.values.intervals import from_ms

_WIDTH = 100


def text_of_test(replay: Replay, code: str) -> str:
    """Return the source of a module with one test. The test expects the result of the replay."""
    job, key, record = replay.planned.plan.job, replay.key, replay.found.record
    module, _, name = code.partition(":")
    inputs = replay.planned.plan.inputs
    settings = {"input_schema": _schema(inputs.rows.schema)}
    initial = replay.planned.rows(INITIAL)
    if inputs.initial is not None:
        settings |= {"initial_state": literal(initial), "initial_schema": _schema(inputs.initial.schema)}
    if replay.pipeline.time_zone is None and job.zone != "UTC":
        settings["time_zone"] = repr(job.zone)
    interval = record.interval
    given = {
        "rows": literal(replay.planned.rows(INPUT), 8),
        "state": literal(values_of(replay.before), 8),
        "timers": literal([time_of(ms) for ms in replay.before.timers()], 8),
    }
    if job.event_time is not None:
        given["watermark"] = _optional(job.event_time.base_ms)
        given["late_until"] = _optional(job.event_time.late_ms)
    expected = {
        "output": replay.output,
        "late": replay.late,
        "state": values_of(replay.run.entries),
        "timers": [time_of(ms) for ms in replay.run.entries.timers()],
    }
    body = [
        f"    tester = PipelineTester({name}, {', '.join(f'{n}={v}' for n, v in settings.items())})",
        "    replayed = tester.replay(",
        f"        {literal(key.named, 8)},",
        f"        Interval({literal(interval.start)}, {literal(interval.end)}),",
        *(f"        {n}={v}," for n, v in given.items()),
        "    )",
    ]
    for attribute, value in expected.items():
        if _has_nan(value):  # NaN is not equal to itself.
            body.append(f"    assert repr(replayed.{attribute}) == repr({literal(value, 4)})")
        else:
            body.append(f"    assert replayed.{attribute} == {literal(value, 4)}")
    title = re.sub(r"\W+", "_", f"{replay.pipeline.name}_{interval.start:%Y_%m_%dT%H%M}_checkpoint_{record.id}")
    text = "\n".join(body)
    return "\n".join([*_head(replay, module, name, text), "", "", f"def test_{title}() -> None:", text, ""])


def _head(replay: Replay, module: str, name: str, body: str) -> Iterator[str]:
    record = replay.found.record
    yield f'"""Checkpoint {record.id} of {replay.pipeline.name!r}, {record.interval}: one key, as `cairn replay` ran it."""'
    yield ""
    used = ["UTC"] if "=UTC" in body else []
    used += [name for name in ("date", "datetime", "time", "timedelta") if re.search(rf"\b{name}\(", body)]
    yield f"from datetime import {', '.join(used)}"
    if "Decimal(" in body:
        yield "from decimal import Decimal"
    yield ""
    if "StructType." in body:
        yield "from pyspark.sql.types import StructType"
        yield ""
    yield "from cairn import Interval"
    yield "from cairn.testing import PipelineTester"
    yield f"from {module} import {name}"


def _optional(ms: int | None) -> str:
    return "None" if ms is None else literal(from_ms(ms))


def _schema(schema: t.StructType) -> str:
    for field in schema.fields:
        if (found := unordered(field.dataType)) is not None:
            raise UsageError(
                f"no test can hold these rows: column {field.name!r} is {field.dataType.simpleString()}, and only Spark can sort "
                f"values of type {found.simpleString()}"
            )
    ddl = ", ".join(
        f"{f.name if re.fullmatch('[A-Za-z_][A-Za-z0-9_]*', f.name) else '`' + f.name.replace('`', '``') + '`'} "
        f"{f.dataType.simpleString()}{'' if f.nullable else ' NOT NULL'}"
        for f in schema.fields
    )
    try:
        exact = parse_ddl_locally(ddl) == schema
    except UsageError:
        exact = False
    return repr(ddl) if exact else f"StructType.fromJson({schema.jsonValue()!r})"


def literal(value: Any, indent: int = 0) -> str:
    """Return Python source that evaluates to the value."""
    flat = _flat(value)
    if len(flat) + indent <= _WIDTH or not value or not isinstance(value, list | dict):
        return flat
    inner, end = " " * (indent + 4), " " * indent
    if isinstance(value, list):
        items = [f"{inner}{literal(item, indent + 4)},\n" for item in value]
        return "[\n" + "".join(items) + end + "]"
    items = [f"{inner}{_flat(k)}: {literal(v, indent + 4)},\n" for k, v in value.items()]
    return "{\n" + "".join(items) + end + "}"


def _flat(value: Any) -> str:
    match value:
        case None | bool() | int() | str() | bytes():
            return repr(value)
        case bytearray():
            return repr(bytes(value))
        case float():
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        case Decimal():
            return f"Decimal({str(value)!r})"
        case datetime():
            return _datetime(value)
        case date():
            return f"date({value.year}, {value.month}, {value.day})"
        case time():
            return f"time({value.hour}, {value.minute}, {value.second}, {value.microsecond})"
        case timedelta():
            return f"timedelta(days={value.days}, seconds={value.seconds}, microseconds={value.microseconds})"
        case dict():
            return "{" + ", ".join(f"{_flat(k)}: {_flat(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_flat, value)) + "]"
        case tuple():
            return "(" + "".join(f"{_flat(item)}, " for item in value).rstrip() + ")"
    raise UsageError(f"no test can hold these rows: Cairn writes no literal for a value of type {type(value).__name__}")


def _datetime(value: datetime) -> str:
    at = value.astimezone(UTC) if value.tzinfo is not None else value
    parts = [at.year, at.month, at.day, at.hour, at.minute, at.second, at.microsecond]
    while len(parts) > 3 and parts[-1] == 0:
        parts.pop()
    zone = ", tzinfo=UTC" if value.tzinfo is not None else ""
    return f"datetime({', '.join(map(str, parts))}{zone})"


def _has_nan(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def check_new(file: Path) -> None:
    """Check that `write_test` can write the file."""
    if os.path.lexists(file):
        raise UsageError(f"{file} exists; give the name of a new file, or remove it")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"{file} can't be written: there is no folder {file.absolute().parent}")


def write_test(replay: Replay, code: str, file: Path) -> None:
    """Write a replay as a test into a new file."""
    text = text_of_test(replay, code)
    check_new(file)
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except OSError as error:
        raise UsageError(f"{file} can't be written: {error}") from error
