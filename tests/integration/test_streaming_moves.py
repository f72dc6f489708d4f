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

from jobs.pipeline import Interval
from jobs.run_interval import run_interval
from jobs.streaming import from_streaming_checkpoint
from jobs.validate import validate_checkpoint
from state_backend.values.intervals import from_ms
from state_backend.values.records import Record
from tests.support.both_engines import Both, pipeline_of, read_rows, read_states
from tests.support.differential_processors import (
    KEY,
    RESULT_SCHEMA,
    SCRIPT_SCHEMA,
    SCRIPT_STATES,
    TYPED_KEY,
    TYPED_RESULT,
    TYPED_SCHEMA,
    UNTIMED_STATES,
    EveryType,
    Scripted,
    ScriptedUntimed,
    event_script,
    random_script,
    typed_rows,
)
from tests.support.spark_streaming import Case, Outcome, ddl, run_under_spark, write_batches

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


TIMED = Case(
    processor=Scripted,
    input_schema=SCRIPT_SCHEMA,
    output_schema=RESULT_SCHEMA,
    key=KEY,
    batches=random_script(7, keys=12, ops=14, batches=4, prefixes=("", "brief_", "long_")),
    states=SCRIPT_STATES,
)
DELAY = timedelta(seconds=10)
EVENT = replace(
    TIMED,
    processor=ScriptedUntimed,
    batches=event_script(3, DELAY),
    states=UNTIMED_STATES,
    time_mode="event",
    event_time="ts",
    watermark_delay=DELAY,
)
TYPED = Case(
    processor=EveryType,
    input_schema=TYPED_SCHEMA,
    output_schema=TYPED_RESULT,
    key=TYPED_KEY,
    batches=typed_rows(),
    states={"value": "value", "list": "list", "map": "map"},
)


@pytest.mark.parametrize(("case", "moved_after"), [(TIMED, 2), (EVENT, 4), (TYPED, 1)], ids=["timed", "event", "typed"])
def test_a_pipeline_goes_on_where_a_query_is(spark: SparkSession, tmp_path: Path, case: Case, moved_after: int) -> None:
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
    assert all(before.states.values()), "the test moves nothing of some state"
    assert validate_checkpoint(spark, pipeline, str(root), record).success
    if case.time_mode == "event":
        assert record.content.time.watermark_ms == theirs.watermarks_ms[0] != before.watermarks_ms[-1]

    records = [run_interval(spark, pipeline, interval, str(root)) for interval in intervals[moved_after:]]
    both = Both(case=case, spark=theirs, cairn=outcome(case, root, records), records=records, root=root, files=files)
    assert both.differences() == []
    assert any(both.spark.outputs)
