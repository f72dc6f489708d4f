"""From a Structured Streaming query to a pipeline and back: each goes on as if the other had never stopped."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from cairn.operations.intervals.run_interval import run_interval
from cairn.operations.savepoints.streaming import continue_from_savepoint, from_streaming_checkpoint, initial_state_of
from cairn.operations.savepoints.take_savepoint import take_savepoint
from cairn.pipeline import Interval, Pipeline
from state_backend.adapters.open_storage import join_url
from state_backend.values.errors import SourceError, StateSchemaError, UsageError
from state_backend.values.intervals import from_ms
from state_backend.values.records import Record
from tests.support.both_engines import NAME, Both, by_entry, comparable, pipeline_of, read_rows, read_states
from tests.support.coordinator import coordinator_of
from tests.support.differential_processors import (
    KEY,
    RESULT_SCHEMA,
    SCRIPT_SCHEMA,
    SCRIPT_STATES,
    UNTIMED_STATES,
    VALUE_TYPES,
    ScriptedUntimed,
    event_script,
    random_script,
    typed_rows,
)
from tests.support.spark_streaming import Case, Outcome, ddl, run_under_spark, write_batches
from tests.support.validating import validate_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

HOUR_MS = 3_600_000


def stage(staged: Sequence[Path], folder: Path, count: int) -> list[Path]:
    """The first files of a case, where a query looks for them, with their times."""
    folder.mkdir(exist_ok=True)
    return [Path(shutil.copy2(file, folder / file.name)) for file in staged[:count]]


def pipeline_over(spark: SparkSession, case: Case, files: Sequence[Path], ends_ms: Sequence[int]) -> Any:
    """The case as a pipeline with an interval for each file; the n-th ends at ``ends_ms[n]``."""
    edges = [from_ms(ms) for ms in (ends_ms[0] - HOUR_MS, *ends_ms)]
    intervals = [Interval(start, end) for start, end in pairwise(edges)]
    schema = ddl(spark, case.input_schema)
    inputs = {i.start: spark.read.schema(schema).parquet(str(f)) for i, f in zip(intervals, files, strict=True)}
    return pipeline_of(case, inputs, edges[0], spark), intervals


def outcome(case: Case, root: Path, records: Sequence[Record]) -> Outcome:
    return Outcome(
        outputs=[read_rows(root, record) for record in records],
        states=read_states(root, records[-1], timed=case.time_mode != "none"),
        processing_times_ms=[],
        watermarks_ms=[],
    )


class ScriptedWithTypes(ScriptedUntimed):
    """With one more state, of every type."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.scope["typed"] = handle.getValueState("typed", VALUE_TYPES)
        self.scope["rows"] = [row[1:] for row in typed_rows()[0]]


class TimedWithTypes(ScriptedWithTypes):
    """And with states that expire."""

    ttl = True


def with_types(batches: list[Any], write: int, read: int) -> list[Any]:
    """The batches with a row of every type for some keys, which a later batch looks at."""
    for n in range(4):
        batches[write].append((f"typed-{n}", n, 0, batches[write][0][3], f"typed.update(rows[{n}])"))
        batches[read].append((f"typed-{n}", n, 0, batches[read][0][3], "typed.get()"))
    return batches


TIMED = Case(
    processor=TimedWithTypes,
    input_schema=SCRIPT_SCHEMA,
    output_schema=RESULT_SCHEMA,
    key=KEY,
    # The third has no rows: only timers and expiry.
    batches=with_types(random_script(7, keys=12, ops=14, batches=3, prefixes=("", "brief_", "long_")), 0, 1),
    states={**SCRIPT_STATES, "typed": "value"},
)
DELAY = timedelta(seconds=10)
EVENT = replace(
    TIMED,
    processor=ScriptedUntimed,
    batches=event_script(3, DELAY)[:4],
    states=UNTIMED_STATES,
    time_mode="event",
    event_time="ts",
    watermark_delay=DELAY,
)


@pytest.mark.parametrize(
    ("case", "moved_after", "moves"),
    [
        pytest.param(
            TIMED,
            1,
            {"v", "l", "m", "long_v", "long_l", "long_m", "brief_v", "typed", "$timers"},
            marks=pytest.mark.long("half a minute"),
        ),
        (EVENT, 2, {"l", "fire", "$timers"}),
    ],
    ids=["timed", "event"],
)
def test_a_pipeline_continues_from_the_checkpoint_of_a_streaming_query(
    spark: SparkSession, tmp_path: Path, case: Case, moved_after: int, moves: set[str]
) -> None:
    """S37, S38, F96: a query runs some batches; its checkpoint is copied and becomes a pipeline's state: values, lists, maps, with
    and without expiry, timers, every type, the watermark. Then both go on with the same input at the same times: every output row
    and the state at the end are equal."""
    staged = write_batches(spark, case, tmp_path / "staged")
    first = stage(staged, tmp_path / "input", moved_after)
    before = run_under_spark(spark, case, first, tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copied")
    files = stage(staged, tmp_path / "input", len(staged))
    theirs = run_under_spark(spark, case, files, tmp_path / "checkpoint", done=moved_after)

    root = tmp_path / "root"
    ends_ms = [*before.processing_times_ms, *theirs.processing_times_ms]
    pipeline, intervals = pipeline_over(spark, case, files, ends_ms)
    so_far = Interval(intervals[0].start, intervals[moved_after - 1].end)
    record = from_streaming_checkpoint(spark, pipeline, str(tmp_path / "copied"), str(root), so_far)
    assert (record.id, record.content.kind, record.content.source_position["batch"]) == (1, "restore", moved_after - 1)
    imported = replace(before, outputs=[], states=read_states(root, record, timed=True))
    as_it_was = Both(
        case=case, spark=replace(before, outputs=[]), cairn=imported, records=[record], root=root, files=first
    )
    assert as_it_was.differences() == []
    assert moves <= {name for name, entries in before.states.items() if entries}, "the test moves nothing of some state"
    if case.time_mode == "event":
        assert validate_checkpoint(spark, pipeline, str(root), record).success
        assert record.content.time.watermark_ms == theirs.watermarks_ms[0] != before.watermarks_ms[-1]
        assert record.content.time.late_watermark_ms == before.watermarks_ms[-1]
        initial = initial_state_of(spark, "latest", root=str(root), pipeline=NAME).agg(F.first("__state.l").alias("l"))
        held = [[(comparable(v), None) for v in row.l] for row in initial.collect() if row.l]
        assert sorted(held, key=repr) == sorted(by_entry(imported.states["l"], "list").values(), key=repr)
        assert max(map(len, held)) > 1

    records = [run_interval(spark, pipeline, interval, str(root)) for interval in intervals[moved_after:]]
    both = Both(case=case, spark=theirs, cairn=outcome(case, root, records), records=records, root=root, files=files)
    assert both.differences() == []
    assert any(both.spark.outputs)


@pytest.mark.long("half a minute of Spark; a move in the other direction is shown too")
def test_a_streaming_query_continues_from_the_savepoint_of_a_pipeline(spark: SparkSession, tmp_path: Path) -> None:
    """A pipeline runs some intervals; its savepoint is the initial state of a query, which goes on with values, lists, maps and
    timers as a query that had run all along: the same rows out for each batch, and the same state at the end."""
    first_ms, timers_ms = 1_704_067_200_000, 3 * HOUR_MS
    batches = []
    for n, batch in enumerate(random_script(11, keys=12, ops=10, batches=4, prefixes=("",))):
        # Timers by event time, none of them due before the new query has a watermark of its own.
        at = from_ms(first_ms + [0, 1, 6, 7][n] * HOUR_MS)
        clock = f"{first_ms + timers_ms}"
        batches.append([(a, b, seq, at, op.replace("now", clock)) for a, b, seq, _, op in batch])
    batches[2] = [("k0", None, 0, from_ms(first_ms + 6 * HOUR_MS), "v.get()")]
    with_types(batches, 1, 3)
    states = {**UNTIMED_STATES, "typed": "value"}
    case = replace(EVENT, processor=ScriptedWithTypes, batches=batches, states=states)
    files = write_batches(spark, case, tmp_path / "input")
    theirs = run_under_spark(spark, case, files, tmp_path / "all-along")

    pipeline, intervals = pipeline_over(spark, case, files, [first_ms + n * HOUR_MS for n in range(1, 5)])
    records = [run_interval(spark, pipeline, interval, str(tmp_path / "root")) for interval in intervals[:2]]
    saved = str(tmp_path / "savepoint")
    take_savepoint(spark, pipeline, join_url(str(tmp_path / "root"), NAME), records[-1], saved)
    processor = continue_from_savepoint(ScriptedWithTypes, "latest", root=str(tmp_path / "root"), pipeline=NAME)
    shutil.rmtree(tmp_path / "root")
    rest = stage(files, tmp_path / "rest", 4)[2:]
    for file in files[:2]:
        (tmp_path / "rest" / file.name).unlink()
    moved = replace(case, processor=processor, batches=batches[2:])
    initial = initial_state_of(spark, saved)
    ours = run_under_spark(spark, moved, rest, tmp_path / "moved", initial=initial)
    theirs = replace(theirs, outputs=theirs.outputs[2:])
    both = Both(case=case, spark=theirs, cairn=ours, records=records, root=tmp_path, files=rest)
    assert both.differences() == []
    assert {"v", "l", "m", "typed", "$timers"} <= {name for name, entries in ours.states.items() if entries}
    fired = [row for batch in ours.outputs for row in batch if row["call"] == "timer"]
    assert fired, "no timer that moved has fired"


def test_a_streaming_checkpoint_that_does_not_fit_the_pipeline_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Before anything is written."""
    case = replace(EVENT, batches=EVENT.batches[:1])
    files = write_batches(spark, case, tmp_path / "input")
    run_under_spark(spark, case, files, tmp_path / "checkpoint")
    pipeline, (interval,) = pipeline_over(spark, case, files, [1_704_067_200_000])

    def refused(error: type[Exception], says: str, path: str = "checkpoint", **changes: Any) -> None:
        changed: Pipeline = replace(pipeline, **{k: v for k, v in changes.items() if k != "operator_id"})
        with pytest.raises(error, match=says):
            from_streaming_checkpoint(
                spark,
                changed,
                str(tmp_path / path),
                str(tmp_path / "root"),
                interval,
                operator_id=changes.get("operator_id", 0),
            )

    untimed = {"time_mode": "processing", "event_time": None, "watermark_delay": None}
    refused(SourceError, "not the checkpoint of a streaming query with state", path="input")
    refused(UsageError, "time_mode is 'processing', but the query .* runs with EventTime", **untimed)
    refused(UsageError, r"key is \['a'\], but the query .* groups by struct<a:string,b:bigint>", key=["a"])
    refused(UsageError, r"operator 1 .* is not a transformWithState; the query has 0", operator_id=1)
    refused(UsageError, "api='row' or 'pandas'", api="arrow")
    refused(
        StateSchemaError, "has the (value|list|map) state '[vlm]', which is differently \\(as a", processor=AnotherKind
    )
    refused(StateSchemaError, "state v: the query .* has struct<n: bigint, s: string>, but init", processor=AnotherType)
    assert not list((tmp_path / "root").rglob("*.sst"))
    assert coordinator_of(pipeline, str(tmp_path / "root")).log().head_id == 0


class AnotherKind(ScriptedUntimed):
    def init(self, handle: Any) -> None:
        for name in ("l", "fire", "when"):
            handle.getValueState(name, "n long")
        handle.getListState("v", "n long, s string")
        handle.getListState("m", "n long")


class AnotherType(ScriptedUntimed):
    def init(self, handle: Any) -> None:
        for name in ("v", "fire", "when"):
            handle.getValueState(name, "n long")
        handle.getListState("l", "n long, s string")
        handle.getMapState("m", "u string", "n long, s string")
