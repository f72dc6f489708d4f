"""One case under Spark and under Cairn, made comparable.

Spark runs first. The intervals then end at the instants at which Spark's batches ran, so that both engines have the same
clock to the millisecond: expiry, timers and everything that a processor computes from the time can be compared as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from pyspark.errors import StreamingQueryException

from cairn.operations.intervals.run_interval import run_interval
from cairn.pipeline import Interval, Pipeline
from state_backend.adapters.open_storage import open_storage
from state_backend.adapters.rocks import EngineOptions
from state_backend.formats.key_codec import KeyCodec
from state_backend.formats.row_codec import RowCodec
from state_backend.formats.types import parse_struct
from state_backend.shard.manifest import manifest_of
from state_backend.shard.restore import restore_shard
from state_backend.values.intervals import from_ms
from state_backend.values.records import OutputFile, Record
from state_backend.values.zones import zone_of
from tests.support.reading import read_entries, read_timers
from tests.support.spark_streaming import Case, Outcome, States, ddl, run_under_spark, write_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_HOUR_MS = 3_600_000
NAME = "case"


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """The outcomes of a case, and of ours the records and where they lie."""

    case: Case
    spark: Outcome
    cairn: Outcome
    records: list[Record]
    root: Path
    files: list[Path]

    def differences(self) -> list[str]:
        """Where outputs (per batch and key, in order) or states and timers at the end differ, one line each."""
        found = []
        for n, (theirs, ours) in enumerate(zip(self.spark.outputs, self.cairn.outputs, strict=True)):
            found += _differences(f"batch {n}, key", by_key(theirs, self.case.key), by_key(ours, self.case.key))
        for name, kind in (*self.case.states.items(), ("$timers", "timers")):
            theirs_, ours_ = (by_entry(o.states.get(name, []), kind) for o in (self.spark, self.cairn))
            found += _differences(f"state {name}, key", theirs_, ours_)
        return found


def run_both(spark: SparkSession, case: Case, folder: Path) -> Both:
    """The case under Spark, then under Cairn in intervals that end when Spark's batches ran."""
    files = write_batches(spark, case, folder / "input")
    for attempt in range(3):
        try:
            theirs = run_under_spark(spark, case, files, folder / f"checkpoint{attempt}")
            break
        except StreamingQueryException as error:
            # Spark gives the first worker of a query ten seconds to start.
            if attempt == 2 or "Python worker failed to connect back" not in str(error):
                raise
    ours, records = run_under_cairn(spark, case, files, folder / "root", theirs.processing_times_ms)
    return Both(case=case, spark=theirs, cairn=ours, records=records, root=folder / "root", files=files)


def pipeline_of(case: Case, inputs: dict[datetime, DataFrame], start: datetime, spark: SparkSession) -> Pipeline:
    """The case as a pipeline. ``inputs``: the rows of each interval by its start."""
    changes: dict[str, Any] = {}
    if case.time_mode == "event":
        changes |= {"event_time": case.event_time or None, "watermark_delay": case.watermark_delay}
    if case.initial_schema:
        initial = spark.createDataFrame(list(case.initial), ddl(spark, case.initial_schema))
        changes |= {"initial_state": lambda spark: initial}
    return Pipeline(
        name=NAME,
        start=start,
        source=lambda spark, interval: inputs[interval.start],
        key=list(case.key),
        processor=case.processor,
        api=case.api,  # type: ignore[arg-type]
        output_schema=case.output_schema,
        time_mode=case.time_mode,  # type: ignore[arg-type]
        order_by=list(case.order_by),
        parallelism=2,
        max_parallelism=16,
        **changes,
    )


def run_under_cairn(
    spark: SparkSession, case: Case, files: Sequence[Path], root: Path, ends_ms: Sequence[int], **changes: Any
) -> tuple[Outcome, list[Record]]:
    """One interval for each file; the n-th ends at ``ends_ms[n]``. ``changes``: of the pipeline."""
    edges = [from_ms(ms) for ms in (ends_ms[0] - _HOUR_MS, *ends_ms)]
    intervals = [Interval(start, end) for start, end in pairwise(edges)]
    schema = ddl(spark, case.input_schema)
    inputs = {i.start: spark.read.schema(schema).parquet(str(f)) for i, f in zip(intervals, files, strict=True)}
    pipeline = replace(pipeline_of(case, inputs, edges[0], spark), **changes)
    records = [run_interval(spark, pipeline, interval, str(root)) for interval in intervals]
    outcome = Outcome(
        outputs=[read_rows(root, record) for record in records],
        states=read_states(root, records[-1], timed=case.time_mode != "none"),
        processing_times_ms=list(ends_ms),
        watermarks_ms=[record.content.time.watermark_ms for record in records],
    )
    return outcome, records


def read_rows(root: Path, record: Record, *, late: bool = False) -> list[dict[str, Any]]:
    """An interval's output rows, or its late input rows, in the order in which they were written, shard by shard."""
    return read_parquet(root / NAME, record.content.outputs, late=late)


def read_parquet(folder: Path, outputs: Sequence[OutputFile], *, late: bool) -> list[dict[str, Any]]:
    """The rows of some output files of a pipeline, whose folder is given."""
    files = [f.handle.path for f in outputs if f.late == late]
    return [row for path in files for row in pq.read_table(folder / path).to_pylist()]


def read_states(root: Path, record: Record, *, timed: bool) -> States:
    """All that a checkpoint holds, restored from its files; instants as ``collect`` gives them, in the process's zone."""
    storage = open_storage(str(root / NAME))
    content = record.content
    zone = zone_of(os.environ.get("TZ") or "UTC").rules
    keys = KeyCodec(parse_struct(content.key_schema), zone=zone)
    found: States = {d.name: [] for d in content.states} | ({"$timers": []} if timed else {})
    for ref in content.shards:
        manifest = manifest_of(ref, storage)
        with (
            TemporaryDirectory(prefix="cairn-test-") as work,
            restore_shard(manifest.key_groups, [manifest], storage, Path(work) / "db", EngineOptions()).store as store,
        ):
            for descriptor in content.states:
                version = descriptor.versions[-1]
                codec = RowCodec(descriptor.name, parse_struct(version.value), version.version, zone=zone)
                user_keys = KeyCodec(parse_struct(version.user_key), zone=zone) if version.user_key else None
                found[descriptor.name] += [
                    (e.key, e.user_key or (), codec.decode(e.row), e.expiry_ms)
                    for e in read_entries(store, descriptor, keys, user_keys)
                ]
            for _, key, expiry_ms in read_timers(store):
                found["$timers"].append((keys.decode(key), (), (expiry_ms,), None))
    return found


def by_key(rows: Sequence[dict[str, Any]], key: Sequence[str]) -> dict[str, list[Any]]:
    """The rows of each key, by those of its columns that are emitted, in their order; keys come in another order under Spark."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        found.setdefault(repr([comparable(row[name]) for name in key if name in row]), []).append(comparable(row))
    return found


def by_entry(entries: Sequence[tuple[Any, ...]], kind: str) -> dict[str, list[Any]]:
    """The values and expiries of each key, for maps of each user key; their order counts in lists only."""
    found: dict[str, list[Any]] = {}
    for key, user_key, value, expiry_ms in entries:
        found.setdefault(repr(comparable((key, user_key))), []).append((comparable(value), expiry_ms))
    return found if kind == "list" else {key: sorted(values, key=repr) for key, values in found.items()}


def _differences(where: str, theirs: dict[str, list[Any]], ours: dict[str, list[Any]]) -> list[str]:
    return [
        f"{where} {key}, item {n}: Spark {spark}, Cairn {cairn}"
        for key in theirs.keys() | ours.keys()
        for n, (spark, cairn) in enumerate(zip_longest(theirs.get(key, ()), ours.get(key, ()), fillvalue="nothing"))
        if spark != cairn
    ]


def comparable(value: Any) -> Any:
    """NaN equals itself, -0.0 is not 0.0, a bytearray is bytes, and rows are tuples."""
    match value:
        case float():
            return "NaN" if math.isnan(value) else ("-0.0" if value == 0 and math.copysign(1, value) < 0 else value)
        case bytearray():
            return bytes(value)
        case dict():
            return {comparable(k): comparable(v) for k, v in value.items()}
        case tuple():
            return tuple(comparable(v) for v in value)
        case list():
            return [comparable(v) for v in value]
    return value
