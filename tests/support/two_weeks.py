"""The examples' first days: all of their pipelines, by the PySpark that this process imports.

python -m tests.support.two_weeks 14 ROOT
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval
from cairn.spark.session import connect
from pipelines.aircraft import AIRCRAFT
from pipelines.weather import RECORDS, WEATHER

DAY = timedelta(days=1)
PIPELINES = (AIRCRAFT, WEATHER, RECORDS)


def main(days: int, root: Path) -> None:
    spark = connect("local[2]", "two weeks")
    for pipeline in PIPELINES:
        intervals = [Interval(pipeline.start + n * DAY, pipeline.start + (n + 1) * DAY) for n in range(days)]
        run_intervals(spark, pipeline, intervals, str(root))
    spark.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
