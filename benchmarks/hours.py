"""Thousands of hours in one call of `run_intervals`: does the cost of an hourly interval grow?

    python -m benchmarks.hours [--hours 8760] [--rows 1000] [--turn 730] [--root FOLDER]

By default the hours are those of a year, with 1,000 rows in each hour and the default retention. The processor counts
and sums by user. After every 730 hours (`--turn`) the program prints the wall time and CPU time of an hour, the files
in the pipeline's folder, the retained checkpoints, the resident memory of all processes, and the entries of the folder
for temporary files. If `--root` already has hours, the program continues after them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks.backfill import loop_s
from benchmarks.processes import cpu_s, own_and_below
from cairn import Interval, Pipeline, range_source, run_intervals
from cairn.aggregates import Count, RunningAggregate, Sum
from cairn.spark.session import connect
from state_backend.checkpoint.location import locate
from state_backend.checkpoint.log import read_log

START, HOUR = datetime(2020, 1, 1, tzinfo=UTC), timedelta(hours=1)


class Totals(RunningAggregate):
    """Rows and sum of each user so far."""

    rows = Count()
    total = Sum("amount")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=int, default=8_760)
    parser.add_argument("--rows", type=int, default=1_000, help="rows of an hour")
    parser.add_argument("--turn", type=int, default=730, help="hours between two lines")
    parser.add_argument("--root", type=Path, help="folder of the state; left out: a temporary one")
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
        newest = read_log(at.storage).newest
        begin = newest.content.interval.end if newest is not None else START
        hours = [Interval(begin + n * HOUR, begin + (n + 1) * HOUR) for n in range(options.hours)]
        spark = connect("local[2]", "cairn hours benchmark")
        spark.sparkContext.setLogLevel("ERROR")
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
