"""Histories of rows for ready-made processors, and the runs of one history in differently cut intervals.

A history is a table of rows in the order of their arrival. An oracle in SQL sees the whole table. `run_cut` sends the same rows through a
pipeline, interval by interval, with re-runs, killed attempts, changes of parallelism and small batches in between.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from cairn import Interval, KeepLast, Pipeline
from cairn.spark.ddl import parse_ddl_locally
from cairn.spark_versions import to_arrow_schema
from cairn.testing import PipelineTester
from tests.support.tiers import at_tier

START = datetime(2024, 3, 30, 22, tzinfo=UTC)  # In some zones, summer time begins in these hours.
HOURS = 6
END = START + timedelta(hours=HOURS)
LONG_AFTER = END + timedelta(days=30)
# The latest row comes so long after its event time.
MOST_LATE = timedelta(minutes=90)
DELAY = MOST_LATE + timedelta(milliseconds=1)
oracle_laws = settings(
    deadline=None,
    max_examples=int(os.environ.get("CAIRN_EXAMPLES", at_tier(fast=3, ci=4, all=100))),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    report_multiple_bugs=False,
)
KEYS: dict[str, list[Any]] = {
    "string": ["", "a", "ä\0b"],
    "bigint": [0, -(2**63), 7],
    "int": [1, -1],
    "smallint": [1, -300],
    "tinyint": [0, 127],
    "boolean": [False, True],
    "binary": [b"", b"\0", b"\xff"],
    "date": [date(1969, 12, 31), date(2024, 2, 29)],
    "timestamp": [START, START + timedelta(microseconds=1)],
    "timestamp_ntz": [START.replace(tzinfo=None), datetime(1969, 12, 31, 23)],
    "decimal(9,2)": [Decimal("1.50"), Decimal("-0.01")],
    "double": [0.5, float("inf"), float("nan")],
    "float": [0.5, -2.0],
    "struct<a:int,b:string>": [{"a": 1, "b": None}, {"a": None, "b": "x"}],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Rows by arrival.

    Attributes:
        schema: DDL of the rows: the key `k`, the order of arrival `arrived` and `seq`, the event time `t`, and other columns.
        rows: The rows.
        zone: Zone of the session.
    """

    schema: str
    rows: pa.Table
    zone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way to run a history.

    Attributes:
        ends: Ends of the intervals, ascending. The first interval begins at START.
        again: For each interval, an earlier one to run again after it; None for none.
        killed: For each interval, True if its first attempt is dropped.
        shards: Number of shards of each interval.
        round_rows: Rows in one call of the processor, as far as keys allow.
        mode: How checkpoints are stored.
    """

    ends: tuple[datetime, ...]
    again: tuple[int | None, ...]
    killed: tuple[bool, ...]
    shards: tuple[int, ...]
    round_rows: int
    mode: Any


_minutes = st.integers(0, HOURS * 12 - 1).map(lambda five: timedelta(minutes=5 * five))
_late = st.sampled_from([0, 0, 1, 5, 30, 60, 90, -10]).map(lambda minutes: timedelta(minutes=minutes))


@st.composite
def histories(
    draw: st.DrawFn, columns: dict[str, tuple[str, Any]] | None = None, most_rows: int = 24, *, null_times: bool = True
) -> History:
    """Make a history: late rows, rows ahead of their time, equal instants, nulls, and any type of key.

    Args:
        draw: Hypothesis' function.
        columns: Type and strategy of each further column.
        most_rows: Upper limit of the number of rows.
        null_times: True if some rows have no event time.
    """
    columns = columns or {}
    of_key = draw(st.sampled_from(sorted(KEYS)))
    time = draw(st.sampled_from(["timestamp", "timestamp_ntz"]))
    zone = draw(st.sampled_from(["UTC", "Europe/Berlin", "America/St_Johns"]))
    one_row = st.tuples(
        st.sampled_from([*KEYS[of_key], None]),
        _minutes,
        st.none() | _late | _late if null_times else _late,
        *(of for _, of in columns.values()),
    )
    drawn = sorted(draw(st.lists(one_row, max_size=most_rows)), key=lambda row: row[1])
    schema = f"k {of_key}, arrived timestamp, seq int, t {time}" + "".join(
        f", {name} {of}" for name, (of, _) in columns.items()
    )
    rows = []
    for seq, (key, minutes, late, *others) in enumerate(drawn):
        at = None if late is None else START + minutes - late
        if at is not None and time == "timestamp_ntz":
            at = at.astimezone(ZoneInfo(zone)).replace(tzinfo=None)  # wall time of the pipeline's zone
        rows.append((key, START + minutes, seq, at, *others))
    arrow = to_arrow_schema(parse_ddl_locally(schema))
    table = pa.Table.from_pylist([dict(zip(arrow.names, row, strict=True)) for row in rows], arrow)
    return History(schema=schema, rows=table, zone=zone)


@st.composite
def _cut(draw: st.DrawFn, ends: tuple[datetime, ...]) -> Cut:
    ends = (*ends, LONG_AFTER)
    return Cut(
        ends=ends,
        again=tuple(draw(st.none() | st.none() | st.none() | st.integers(0, at)) for at in range(len(ends))),
        killed=tuple(draw(st.sampled_from([False] * 5 + [True])) for _ in ends),
        shards=tuple(draw(st.sampled_from([1, 1, 2])) for _ in ends),
        round_rows=draw(st.sampled_from([1, 3, 65_536])),
        mode=draw(st.sampled_from(["incremental", "changelog", "full"])),
    )


@st.composite
def three_cuts(draw: st.DrawFn) -> list[Cut]:
    """Make three cuts of the same time: one interval, an interval of one or two hours each, and any other."""
    hours = draw(st.sampled_from([1, 2]))
    ends = sorted(draw(st.sets(st.integers(1, HOURS * 60 - 1), max_size=3)))
    return [
        draw(_cut((END,))),
        draw(_cut(tuple(START + timedelta(hours=hour) for hour in range(hours, HOURS + 1, hours)))),
        draw(_cut((*(START + timedelta(minutes=end) for end in ends), END))),
    ]


def pipeline_of(processor: type, **settings: Any) -> Pipeline:
    """Return a pipeline of the histories' rows. They count in the order of their arrival."""
    timed = {"time_mode": "event", "event_time": "t", "watermark_delay": DELAY, "watermark": "interval"}
    return Pipeline(
        name="ready",
        start=START,
        source=lambda spark, interval: None,
        key=["k"],
        processor=processor,
        api="arrow",
        order_by=["arrived", "seq"],
        retention=KeepLast(1000),  # Any interval may run again.
        **{**timed, **settings},
    )


def run_cut(
    pipeline: Pipeline, history: History, cut: Cut, late: list[int] | None = None
) -> list[list[dict[str, Any]]]:
    """Run a history in the intervals of a cut. Return the output of each interval.

    A re-run must emit the rows of the first run.

    Args:
        pipeline: The pipeline.
        history: The history.
        cut: The intervals.
        late: Gets the `seq` of late rows. None: no row may be late.
    """
    tester = PipelineTester(pipeline, input_schema=history.schema, time_zone=history.zone, mode=cut.mode)
    done: list[tuple[pa.Table, Interval, list[dict[str, Any]]]] = []
    start = START
    with patch("cairn.runners.arrow_runner.ROUND_ROWS", cut.round_rows):
        for at, end in enumerate(cut.ends):
            arrived = history.rows["arrived"]
            inside = pc.and_(
                pc.greater_equal(arrived, pa.scalar(start, arrived.type)),
                pc.less(arrived, pa.scalar(end, arrived.type)),
            )
            rows, interval = history.rows.filter(inside), Interval(start, end)
            tester.rescale(cut.shards[at])
            if cut.killed[at]:
                tester.run(rows, interval, commit=False)
            result = tester.run(rows, interval)
            assert late is not None or not result.late
            if late is not None:
                late += [row["seq"] for row in result.late]
            done.append((rows, interval, result.output))
            if (again := cut.again[at]) is not None:
                old_rows, old_interval, output = done[again]
                assert as_texts(tester.run(old_rows, old_interval).output) == as_texts(output)
            start = end
    return [output for _, _, output in done]


def union(outputs: list[list[dict[str, Any]]]) -> list[str]:
    """Return all rows of all intervals, as sorted texts."""
    return as_texts([row for output in outputs for row in output])


def as_texts(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows as sorted texts, to compare rows that have no order."""
    return sorted(repr({name: row[name] for name in sorted(row)}) for row in rows)


def ask(sql: str, history: History) -> list[dict[str, Any]]:
    """Answer a query over the table `history` with DuckDB."""
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("history", history.rows)
        found = connection.sql(sql).to_arrow_table()
    fields = [history.rows.schema.field(f.name) if f.name in history.rows.column_names else f for f in found.schema]
    rows: list[dict[str, Any]] = found.cast(pa.schema(fields)).to_pylist()
    return rows
