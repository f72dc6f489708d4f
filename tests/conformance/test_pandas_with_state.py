"""The same function under Spark's ``applyInPandasWithState`` and here: what it sees, what it yields, what is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import ArrayType, IntegerType, LongType, StructType

from cairn.operations.intervals.run_interval import run_interval
from cairn.pandas_with_state import STATE, as_spark_gives, columns_of, pandas_with_state, scalar
from cairn.pipeline import Interval, Pipeline
from state_backend.values.errors import UsageError
from tests.conformance.group_state import (
    INPUT_SCHEMA,
    KEY,
    OUTPUT_SCHEMA,
    STATE_SCHEMA,
    T0_MS,
    by_event_time,
    by_processing_time,
    rows,
    scripted,
    untimed,
)
from tests.support.both_engines import Both, run_under_cairn
from tests.support.spark_streaming import Case, Rows, run_under_spark, write_batches

if TYPE_CHECKING:
    from pyspark.sql import GroupedData, SparkSession

HOUR_MS = 3_600_000
UPDATE = "state.update((1, None, 'x'))"
SOON, LATER = "state.setTimeoutDuration(1)", "state.setTimeoutDuration(36_000_000)"

PROCESSING: list[Rows] = [
    rows(
        *((1, call) for call in (UPDATE, "state.get", "state.get[0] + 1")),
        *((2, call) for call in ("state.get", "state.getOption", "state.remove()", "state.exists")),
        *((3, call) for call in (UPDATE, SOON)),
        *((4, call) for call in (UPDATE, LATER)),
        *((5, call) for call in (SOON, LATER, SOON)),
        *((6, call) for call in (UPDATE, SOON, "state.remove()", "state.exists", "state.get")),
        *((7, call) for call in ("state.update(None)", "state.update(5)", "state.exists")),
        (8, "state.setTimeoutDuration('1 second')"),
        (8, "state.setTimeoutDuration(0)"),
        (8, "state.setTimeoutDuration(-1)"),
        (8, "state.setTimeoutTimestamp(5)"),
        (8, "state.setTimeoutDuration(1.5)"),
        (9, "state.update((np.int64(3), pd.Timestamp('2024-01-02T03:04:05.000006'), np.str_('q')))"),
        (9, "state.get"),
        *((10, call) for call in (UPDATE, SOON)),
        *((11, call) for call in (UPDATE, SOON)),
        *((12, call) for call in (UPDATE, SOON)),
        (13, "state.update([None, None, None])"),
        (None, UPDATE),
        (None, SOON),
    ),
    rows(
        *((1, call) for call in ("state.get", "state.remove()", "state.exists", "state.getOption")),
        (4, "state.get"),
        (9, "state.get, type(state.get[0]).__name__, type(state.get[1]).__name__"),
        # Spark forgets a timeout only if the state is written; else the key times out now, and in every batch again.
        (10, "'no write'"),
        (11, UPDATE),
        (12, "state.remove()"),
        (13, "state.getOption"),
    ),
    rows(
        (1, "state.exists"),
        (4, UPDATE),
        (11, "'no timeout'"),
        (3, "state.get"),
        (6, "state.update((2, None, 'again'))"),
    ),
    rows((1, "'last'")),
]
# Those that time out and write nothing.
PROCESSING_STUCK = {3, 5, 8, 10, None}

EVENT: list[Rows] = [
    rows(
        (1, UPDATE),
        (1, f"state.setTimeoutTimestamp({T0_MS + 4 * HOUR_MS})"),
        (2, "state.setTimeoutTimestamp(datetime(2024, 1, 1, 3))"),
        *((3 + n, f"state.setTimeoutTimestamp({T0_MS + 6 * HOUR_MS + n - 1})") for n in range(3)),
        *((6, f"state.setTimeoutTimestamp({ms})") for ms in ("0", "-4", "'4'", "5")),
        (6, "state.setTimeoutDuration(4)"),
        hour=5,
    ),
    rows(
        *((9, f"state.setTimeoutTimestamp({T0_MS + h * HOUR_MS})") for h in (0, 4)),
        (1, "state.update((2, None, 'y'))"),
        (1, f"state.setTimeoutTimestamp({T0_MS + 5 * HOUR_MS})"),
        hour=7,
    ),
    rows((9, "state.remove()"), hour=8),
    rows((8, "'advance'"), hour=9),
]


def case_of(processor: Callable[[], Any], batches: list[Rows], **changes: Any) -> Case:
    return Case(
        processor=processor,
        input_schema=INPUT_SCHEMA,
        output_schema=OUTPUT_SCHEMA,
        key=KEY,
        batches=batches,
        states={STATE: "value"},
        api="pandas",
        **changes,
    )


def run(spark: SparkSession, case: Case, timeout: str, folder: Path) -> tuple[Both, dict[Any, Any]]:
    """The case under both, and Spark's states: key -> (value or None, timeout in ms or -1)."""

    def operator(grouped: GroupedData) -> Any:
        return grouped.applyInPandasWithState(scripted, OUTPUT_SCHEMA, STATE_SCHEMA, "Append", timeout)

    files = write_batches(spark, case, folder / "input")
    theirs = run_under_spark(spark, case, files, folder / "checkpoint", operator=operator)
    ours, records = run_under_cairn(spark, case, files, folder / "root", theirs.processing_times_ms)
    stored = spark.read.format("statestore").load(str(folder / "checkpoint")).collect()
    states = {
        tuple(r.key): (
            tuple(r.value.groupState) if r.value.groupState else None,
            r.value.asDict().get("timeoutTimestamp", -1),
        )
        for r in stored
    }
    both = Both(case=case, spark=theirs, cairn=ours, records=records, root=folder / "root", files=files)
    return both, states


def our_states(both: Both) -> dict[Any, Any]:
    """The same of ours: a timeout is the millisecond before its timer."""
    values = {key: value for key, _, value, _ in both.cairn.states[STATE]}
    timers = {key: expiry[0] - 1 for key, _, expiry, _ in both.cairn.states["$timers"]}
    assert len(timers) == len(both.cairn.states["$timers"]), "a key has two timeouts"
    return {key: (values.get(key), timers.get(key, -1)) for key in values.keys() | timers.keys()}


def check(both: Both, states: dict[Any, Any], stuck: set[Any]) -> None:
    assert [d for d in both.differences() if d.startswith("batch")] == []
    ours = our_states(both)
    assert {k: v for k, v in ours.items() if k[0] not in stuck} == {
        k: v for k, v in states.items() if k[0] not in stuck
    }
    assert {k[0] for k in states if k[0] in stuck} == stuck
    # A timeout that fires again and again is always due, whatever its instant.
    for key, (value, timeout_ms) in states.items():
        if key[0] in stuck:
            assert ours[key][0] == value and -1 < ours[key][1] <= timeout_ms


@pytest.mark.long("ten seconds of Spark")
@pytest.mark.spark
def test_processing_time_timeouts_match_apply_in_pandas_with_state(spark: SparkSession, tmp_path: Path) -> None:
    both, states = run(spark, case_of(by_processing_time, PROCESSING), "ProcessingTimeTimeout", tmp_path)
    check(both, states, PROCESSING_STUCK)
    assert sum('"state": [true' in row["answer"] for row in both.cairn.outputs[1]) == 6
    assert {key[0] for key in states} > PROCESSING_STUCK


@pytest.mark.spark
@pytest.mark.long("half a minute of Spark's own streaming queries")
def test_event_time_timeouts_match_apply_in_pandas_with_state(spark: SparkSession, tmp_path: Path) -> None:
    """No row is late: what each engine takes for late is tested elsewhere."""
    case = case_of(by_event_time, EVENT, time_mode="event", event_time="at", watermark_delay=timedelta(hours=1))
    both, states = run(spark, case, "EventTimeTimeout", tmp_path)
    check(both, states, {1, 2, 3, 4, 5, 6})
    assert both.spark.watermarks_ms == [0, *(T0_MS + h * HOUR_MS for h in (4, 6, 7))]


def under_transform_with_state(spark: SparkSession, folder: Path) -> Both:
    # Spark hands out the rows of a null number one by one.
    case = case_of(by_processing_time, [[row for row in batch if row[0] is not None] for batch in PROCESSING])
    files = write_batches(spark, case, folder / "input")
    theirs = run_under_spark(spark, case, files, folder / "checkpoint")
    ours, records = run_under_cairn(spark, case, files, folder / "root", theirs.processing_times_ms)
    return Both(case=case, spark=theirs, cairn=ours, records=records, root=folder / "root", files=files)


@pytest.mark.long("minutes: Spark's own streaming queries")
@pytest.mark.spark
def test_adapter_gives_the_same_under_transform_with_state_in_pandas(spark: SparkSession, tmp_path: Path) -> None:
    """The adapter gives under Spark's ``transformWithStateInPandas`` what it gives here."""
    assert under_transform_with_state(spark, tmp_path).differences() == []


@pytest.mark.long("minutes: Spark's own streaming queries")
@pytest.mark.spark
def test_a_pipeline_without_timeouts_gives_what_spark_gives(spark: SparkSession, tmp_path: Path) -> None:
    batches: list[Rows] = [rows((1, UPDATE), (1, SOON), (2, "state.setTimeoutTimestamp(5)")), rows((1, "state.get"))]
    check(*run(spark, case_of(untimed, batches), "NoTimeout", tmp_path / "untimed"), set())


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (5, "int", np.int32(5)),
        (5, "bigint", np.int64(5)),
        (None, "tinyint", np.float64("nan")),
        (None, "float", np.float32("nan")),
        (float("nan"), "double", np.float64("nan")),
        (True, "boolean", np.bool_(True)),
        (None, "boolean", None),
        (None, "timestamp", pd.NaT),
        ("x", "string", "x"),
        ([1], ArrayType(IntegerType()), np.array([1], dtype="int32")),
    ],
)
def test_each_part_of_a_key_has_the_type_that_spark_gives(value: Any, kind: Any, expected: Any) -> None:
    found = scalar(value, kind)
    assert type(found) is type(expected) and repr(found) == repr(expected)


def test_columns_have_the_dtypes_of_arrow() -> None:
    nested = StructType().add("a", ArrayType(LongType())).add("s", StructType().add("x", IntegerType()))
    frame = pd.DataFrame({"a": [[1], None], "s": [{"x": 1}, None]})
    ddl = columns_of("a ARRAY <long>, `s`: struct<x: int>")
    assert ddl == columns_of(nested)
    given = as_spark_gives(frame, ddl)
    assert [type(v).__name__ for v in given["a"]] == ["ndarray", "NoneType"]
    assert given["s"].tolist() == [{"x": 1}, None]
    flat = columns_of("a: int, `b` BYTE comment 'x', c decimal(10, 2) not null, d real")
    assert flat == {"a": "int", "b": "tinyint", "c": "decimal(10,", "d": "float"}
    frame = pd.DataFrame({"a": [1, 2], "b": [None, None], "c": ["x", "y"], "d": [None, 0.1]}, index=[3, 4])
    given = as_spark_gives(frame, flat)
    assert given.dtypes.astype(str).tolist() == ["int32", "float64", "object", "float32"]
    assert given.index.tolist() == [3, 4]
    assert as_spark_gives(frame.assign(b=[1.0, 2.0]), flat).dtypes.astype(str)["b"] == "int8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeout": "Never"}, "timeout='Never' is not one of NoTimeout"),
        ({"key": ["z"]}, "lacks the key column 'z'; it has k, n"),
        ({"input_schema": "k string, n array<int"}, "expected '>'"),
        ({"input_schema": "k string, n"}, "'n' is not a column definition"),
    ],
)
def test_wrong_arguments_of_pandas_with_state_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pandas_with_state(
            scripted, **{"key": ["k"], "input_schema": "k string, n int", "state_schema": "n int", **changes}
        )


@pytest.mark.spark
def test_documented_pandas_with_state_example_runs(spark: SparkSession, tmp_path: Path) -> None:
    """The block in the docs runs as it stands."""
    text = (Path(__file__).parents[2] / "docs" / "processors.md").read_text()
    blocks = [b.split("```")[0] for b in text.split("```python\n")[1:]]
    (block,) = [b for b in blocks if "pandas_with_state" in b]
    edges = [datetime(2024, 1, 1, hour, tzinfo=UTC) for hour in (0, 1, 2)]
    visited = [("ann", "a", edges[0]), ("ann", "b", edges[0]), ("bob", "a", edges[0])]
    inputs = dict(zip(edges, (visited, [("bob", "b", edges[1])]), strict=False))
    schema = "user string, page string, at timestamp"
    source = {
        "name": "visits",
        "start": edges[0],
        "source": lambda spark, interval: spark.createDataFrame(inputs[interval.start], schema),
    }
    scope: dict[str, Any] = {"Pipeline": lambda *_, **given: Pipeline(**source, **given)}
    module = ModuleType("documented_function")
    module.__file__ = str(tmp_path / "documented_function.py")
    Path(module.__file__).write_text(block)
    vars(module).update(scope)
    sys.modules[module.__name__] = module
    try:
        exec(compile(block, module.__file__, "exec"), vars(module))
        intervals = [Interval(*pair) for pair in pairwise(edges)]
        records = [run_interval(spark, module.PIPELINE, interval, str(tmp_path)) for interval in intervals]
    finally:
        del sys.modules[module.__name__]
    files = [[f"{tmp_path}/visits/{f.handle.path}" for f in r.content.outputs] for r in records]
    rows = [[row for f in paths for row in pq.read_table(f).to_pylist()] for paths in files]
    assert rows == [[], [{"user": "ann", "visits": 2}]]
