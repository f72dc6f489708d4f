"""`PipelineTester` beside `run_interval` on Spark: the same rows in the same order, the same state to the bit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from cairn.aggregates import Count, First, Last, Max, RunningAggregate, Sum
from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from cairn.processors import Deduplicate, History, Latest, TopN, TumblingWindow
from cairn.spark.ddl import parse_ddl, parse_ddl_by_spark, parse_ddl_locally
from cairn.testing import PipelineTester
from state_backend.values.errors import UsageError
from state_backend.values.records import Record
from tests.support.tiers import long_after

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

START = datetime(2024, 3, 31, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEMA = """
    k double, name string, at timestamp, local timestamp_ntz, f float, d double, n int, big long, small tinyint, money decimal(20,3),
    day date, raw binary, flag boolean, items array<double>, place struct<x: float, tags: array<string>>
"""
# Rows of one of a few kinds differ in these columns only, so that many tie in all but the sign of a zero.
SIGNED = ("f", "d", "items", "place")
VALUES: dict[str, Callable[[random.Random, datetime], Any]] = {
    "k": lambda r, start: r.choice([0.0, -0.0, 1.5, math.nan, None]),
    "name": lambda r, start: r.choice(["a", "é", "z", "\U0001f600", "", None]),
    "at": lambda r, start: r.choice([start + timedelta(minutes=r.randrange(-180, 60, 20)), None]),
    "local": lambda r, start: datetime(2024, 3, 31, 2, r.randrange(0, 60, 30)),
    "f": lambda r, start: r.choice([0.0, -0.0, 0.1, None]),
    "d": lambda r, start: r.choice([0.0, -0.0, math.nan, math.copysign(math.nan, -1)]),
    "n": lambda r, start: r.choice([-1, 0, None]),
    "big": lambda r, start: r.choice([-(2**63), 2**63 - 1]),
    "small": lambda r, start: r.choice([-128, 127]),
    "money": lambda r, start: r.choice([Decimal("-0.001"), Decimal("1e16"), None]),
    "day": lambda r, start: r.choice([date(1969, 12, 31), date(2024, 2, 29)]),
    "raw": lambda r, start: r.choice([b"", b"\x00", b"\xff", None]),
    "flag": lambda r, start: r.choice([True, False, None]),
    "items": lambda r, start: r.choice([[], [0.0], [-0.0], [None], [math.nan, 1.0], None]),
    "place": lambda r, start: r.choice(
        [None, {"x": -0.0, "tags": None}, {"x": 0.0, "tags": None}, {"x": None, "tags": ["b", None]}]
    ),
}


class Transcript(StatefulProcessor):
    """Puts out every row as it comes, numbered, and keeps the last of each key: any other order shows in both."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._last = handle.getValueState("last", "n long, row string")
        self._names = handle.getMapState("names", "name string", "rows long")
        self._seen = handle.getListState("seen", "big long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._last.update((initialState.n, "initial"))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        n = self._last.get()[0] if self._last.exists() else 0
        for row in rows:
            n += 1
            text = repr(row)
            self._last.update((n, text))
            self._names.updateValue((row.name,), (n,))
            self._seen.appendValue((row.big,))
            if row.at is not None and n % 3 == 0:
                self._handle.registerTimer(int(row.at.timestamp() * 1000) + 1_200_000)
            yield Row(key=repr(key), n=n, row=text, watermark=timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(key=repr(tuple(key)), n=-1, row=str(expiredTimerInfo.getExpiryTimeInMs()), watermark=None)


class FrameTranscript(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        (n,) = self._count.get() or (0,)
        for frame in rows:
            n += len(frame)
            text = [repr(row) for row in frame.itertuples(index=False)] + [str(frame.dtypes.to_dict())]
            yield pd.DataFrame({"key": repr(key), "n": n, "row": text, "watermark": 0})
        self._count.update((n,))


class Totals(RunningAggregate):
    rows = Count()
    total = Sum("n")
    largest = Max("money")
    first = First("raw")
    last = Last("d")


class OfHalfAnHour(Deduplicate):
    horizon = timedelta(minutes=30)
    keep = "last"
    output_duplicates = True


class Newest(Latest):
    version = ("money", "n")
    deleted = "flag"
    horizon = HOUR


class Versions(History):
    deleted = "flag"


class Best(TopN):
    n = 2
    order = ("d desc", "small")
    ties = "all"


class Quarters(TumblingWindow):
    size = timedelta(minutes=15)
    early = True
    rows = Count()
    largest = Max("money")
    place = Last("place")


TEXT = "key string, n long, row string, watermark long"
BASE = Pipeline(
    name="both",
    start=START,
    source=lambda spark, interval: None,  # type: ignore[arg-type, return-value]
    key=["k"],
    processor=Transcript,
    output_schema=TEXT,
    max_parallelism=16,
)
EVENT: dict[str, Any] = {"time_mode": "event", "event_time": "at", "watermark_delay": timedelta(minutes=30)}
CASES: dict[str, Pipeline] = {
    "rows": replace(BASE, time_zone="Europe/Berlin", order_by=["at"], initial_state=lambda spark: None),  # type: ignore[arg-type, return-value]
    "keys of many columns": replace(BASE, key=["day", "items", "place", "name"], parallelism=3),
    "observed watermark": replace(BASE, **EVENT),
    "watermark of the interval": replace(BASE, **EVENT, watermark="interval", key=["name"]),
    "frames": replace(BASE, api="pandas", processor=FrameTranscript, key=["flag", "k"], time_zone="Europe/Berlin"),
    "arrow": replace(
        BASE,
        api="arrow",
        processor=Totals,
        time_mode="none",
        output_schema="k double, rows long, total long, largest decimal(20,3), first binary, last double",
    ),
}
READY_MADE = replace(BASE, api="arrow", output_schema=None)
# `local` is 02:00 or 02:30, never null. The timers of 02:15 fire at 03:00.
LOCAL: dict[str, Any] = {
    **EVENT,
    "event_time": "local",
    "watermark_delay": timedelta(minutes=45),
    "watermark": "interval",
}
CASES |= {
    "Deduplicate": replace(READY_MADE, processor=OfHalfAnHour, **EVENT, watermark="interval"),
    "Latest": replace(READY_MADE, processor=Newest, key=["name"]),
    "History": replace(READY_MADE, processor=Versions, **LOCAL),
    "TopN": replace(READY_MADE, processor=Best, key=["day", "name"], order_by=["at"]),
    "TumblingWindow": replace(READY_MADE, processor=Quarters, **LOCAL),
}


def rows_of(n: int, seed: int, start: datetime) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    kinds = [{name: value(chance, start) for name, value in VALUES.items()} for _ in range(12)]
    return [chance.choice(kinds) | {name: VALUES[name](chance, start) for name in SIGNED} for _ in range(n)]


def comparable(rows: list[dict[str, Any]]) -> list[str]:
    return [repr(row) for row in rows]


def read(root: Path, record: Record, *, late: bool) -> list[dict[str, Any]]:
    files = [root / "both" / f.handle.path for f in record.content.outputs if f.late == late]
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("name", long_after(6, CASES, "seconds of Spark"))
def test_a_tested_interval_gives_the_output_and_state_of_spark(spark: SparkSession, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    schema, initial_schema = parse_ddl(spark, SCHEMA), "k double, n long"
    initial = [(0.0, 40), (math.nan, 50), (None, 60), (7.0, 70)]
    intervals = [Interval(a, b) for a, b in pairwise(START + n * HOUR for n in range(4))]
    inputs = {i: rows_of(150, seed, i.start) for seed, i in enumerate(intervals)}
    inputs[intervals[1]] = []
    frames = {
        i: spark.createDataFrame([tuple(r[c] for c in schema.names) for r in rows], schema).repartition(3)
        for i, rows in inputs.items()
    }
    initial_frame = spark.createDataFrame(initial, initial_schema)
    real = replace(
        case,
        source=lambda session, interval: frames[interval],
        initial_state=case.initial_state and (lambda session: initial_frame),
    )
    given: dict[str, Any] = {"initial_state": initial, "initial_schema": initial_schema} if case.initial_state else {}
    tester = PipelineTester(case, input_schema=SCHEMA, **given)
    for interval, rows in inputs.items():
        record = run_interval(spark, real, interval, str(tmp_path))
        tested = tester.run(rows)
        assert tested.record is not None
        assert tested.interval == interval
        assert comparable(tested.output) == comparable(read(tmp_path, record, late=False))
        assert comparable(tested.late) == comparable(read(tmp_path, record, late=True))
        for field in ("digest", "time", "key_schema", "states", "output_schema"):
            assert getattr(tested.record.content, field) == getattr(record.content, field)
        totals = tested.record.content.totals, record.content.totals
        assert [(t.input_rows, t.output_rows, t.keys, t.entries) for t in totals[:1]] == [
            (t.input_rows, t.output_rows, t.keys, t.entries) for t in totals[1:]
        ]
    assert len(tester.run(rows_of(5, 9, START)).output) >= 1
    if name == "observed watermark":
        assert any(tester.state("names"))
        assert tested.late


@pytest.mark.parametrize(
    "ddl",
    [
        "a int",
        "a: int, b STRING",
        "`odd name``s` bigint NOT NULL COMMENT 'it\\'s', c decimal, d DECIMAL(5), e numeric(38, 10)",
        "m map<string,array<struct<x:int,y: double not null>>>, s struct<>",
        "a boolean, b tinyint, c byte, d smallint, e short, f integer, g long, h float, i real, j double, k date",
        "a timestamp, b timestamp_ltz, c timestamp_ntz, d binary, e void",
        "nested struct<a: struct<b: array<array<int>>>>",
        "",
    ],
)
def test_ddl_is_read_as_spark_reads_it(spark: SparkSession, ddl: str) -> None:
    assert parse_ddl_locally(ddl) == parse_ddl_by_spark(spark, ddl) == parse_ddl(spark, ddl)


@pytest.mark.parametrize(
    "ddl", ["a", "a nothing", "a int b int", "a array<int", "a decimal(x)", "a int,", "a int;", "1"]
)
def test_ddl_that_spark_refuses_is_refused(spark: SparkSession, ddl: str) -> None:
    for parse in (parse_ddl, parse_ddl_by_spark):
        with pytest.raises(UsageError):
            parse(spark, ddl)
    with pytest.raises(UsageError, match="not a schema"):
        parse_ddl_locally(ddl)


def test_ddl_with_sparks_own_type_names_gives_the_same_schema(spark: SparkSession) -> None:
    """Spark's own parser writes what this one reads."""
    schema: StructType = parse_ddl_locally(SCHEMA)
    assert parse_ddl_locally(", ".join(f"{f.name} {f.dataType.simpleString()}" for f in schema)) == parse_ddl_by_spark(
        spark, SCHEMA
    )
