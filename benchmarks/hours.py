"""Thousands of hours in one call of `run_intervals`: does the cost of an hourly interval grow?

    python -m benchmarks.hours [--hours 8760] [--rows 1000] [--turn 730] [--root FOLDER] [--before 0]

By default the hours are those of a year, with 1,000 rows in each hour and the default retention. The processor counts
and sums by user. After every 730 hours (`--turn`) the program prints the wall time and CPU time of an hour, the files
in the pipeline's folder, the retained checkpoints, the resident memory of all processes, and the entries of the folder
for temporary files. If `--root` already has hours, the program continues after them.

`--before` commits that many hours beforehand, without rows, without Spark and without flushing the disk: for the log
of an old pipeline. Their commits and clean-ups are those of real hours.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from pyspark.sql import DataFrame, SparkSession

from benchmarks.backfill import loop_s
from benchmarks.processes import cpu_s, own_and_below
from cairn import Interval, Pipeline, range_source, run_intervals
from cairn.aggregates import Count, RunningAggregate, Sum
from cairn.operations.intervals.run_interval import finish_commit
from cairn.spark.session import connect
from state_backend.checkpoint.commit_attempt import commit
from state_backend.checkpoint.location import Location, locate
from state_backend.checkpoint.log import read_log, read_newest
from state_backend.checkpoint.prepared_attempts import create_prepared
from state_backend.values.records import Prepared

START, HOUR = datetime(2020, 1, 1, tzinfo=UTC), timedelta(hours=1)


class Totals(RunningAggregate):
    """Rows and sum of each user so far."""

    rows = Count()
    total = Sum("amount")


def commit_hours(spark: SparkSession, pipeline: Pipeline, at: Location, count: int) -> None:
    """Commit further hours without rows. The state stays that of the newest hour before them."""
    log = read_newest(at.storage)
    with mock.patch.object(os, "fsync"):
        for _ in range(count):
            base = log.newest
            assert base is not None
            last = base.content
            content = replace(
                last,
                attempt=str(uuid.uuid4()),
                base_id=base.id,
                interval=Interval(last.interval.end, last.interval.end + HOUR),
                outputs=(),
            )
            prepared = create_prepared(at, Prepared(h0=base.id, content=content, written=()))
            committed = commit(at, content.attempt, prepared=prepared, before=log)
            log = committed.log or read_newest(at.storage)
            finish_commit(spark, pipeline, at, committed.id, log)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=int, default=8_760)
    parser.add_argument("--rows", type=int, default=1_000, help="rows of an hour")
    parser.add_argument("--turn", type=int, default=730, help="hours between two lines")
    parser.add_argument("--root", type=Path, help="folder of the state; left out: a temporary one")
    parser.add_argument("--before", type=int, default=0, help="hours without rows to commit first")
    options = parser.parse_args()
    count = options.rows

    @range_source
    def rows(spark: SparkSession, intervals: Sequence[Interval]) -> tuple[DataFrame, list[dict[str, Any]]]:
        first, end = ((at - START) // HOUR * count for at in (intervals[0].start, intervals[-1].end))
        read = spark.range(first, end).selectExpr(
            "concat('u', pmod(xxhash64(id), 5000)) as user",
            "id as amount",
            f"timestamp_seconds({int(START.timestamp())} + id div {count} * 3600) as cairn_interval",
        )
        return read, [{"from": one.start_ms, "counts": {"rows": count}} for one in intervals]

    pipeline = Pipeline(
        name="hours",
        start=START,
        source=rows,
        key=["user"],
        processor=Totals,
        parallelism=2,
        max_parallelism=128,
    )
    with tempfile.TemporaryDirectory(prefix="cairn-hours-") as folder:
        root = options.root or Path(folder)
        at = locate(str(root), pipeline.name)
        spark = connect("local[2]", "cairn hours benchmark")
        spark.sparkContext.setLogLevel("ERROR")
        if options.before:
            run_intervals(spark, pipeline, [Interval(START, START + HOUR)], str(root))
            commit_hours(spark, pipeline, at, options.before)
        newest = read_log(at.storage).newest
        begin = newest.content.interval.end if newest is not None else START
        hours = [Interval(begin + n * HOUR, begin + (n + 1) * HOUR) for n in range(options.hours)]
        print(json.dumps({"20,000,000 additions, s": loop_s(), "first hour": str(begin)}), flush=True)
        done, began_s, cpu_began_s = 0, time.perf_counter(), sum(cpu_s().values())

        def on_outcome(*_: Any) -> None:
            nonlocal done, began_s, cpu_began_s
            done += 1
            if done % options.turn:
                return
            now_s, cpu_now_s = time.perf_counter(), sum(cpu_s().values())
            line = {
                "hours": done,
                "seconds of an hour": round((now_s - began_s) / options.turn, 4),
                "CPU seconds of an hour": round((cpu_now_s - cpu_began_s) / options.turn, 4),
                "files": sum(len(files) for _, _, files in os.walk(root)),
                "retained": len(read_log(at.storage).retained),
                "resident MiB of all": sum(one.resident_bytes for one in own_and_below()) // 2**20,
                "temporary entries": len([*Path(tempfile.gettempdir()).iterdir()]),
            }
            print(json.dumps(line), flush=True)
            began_s, cpu_began_s = time.perf_counter(), sum(cpu_s().values())

        run_intervals(spark, pipeline, hours, str(root), on_outcome=on_outcome)
        print(json.dumps({"20,000,000 additions, s": loop_s()}))
        spark.stop()


if __name__ == "__main__":
    main()
