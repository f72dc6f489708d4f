"""A process that runs a range of days, to be killed at any time; without Spark, unless it is told where one is.

    python -m tests.support.range_driver ROOT DAYS TRY [SPARK]

With CAIRN_TEST_SINK, a folder, the pipeline has a sink that writes there. It prints ``ready`` when it begins, and a line for each day that it has committed.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cairn import testing
from cairn.operations.intervals.run_intervals import run_intervals
from cairn.pipeline import Interval, Pipeline
from cairn.rows.local_rows import LocalRows
from cairn.spark.ddl import parse_ddl_locally
from cairn.spark.session import connect
from state_backend.values.records import RunRef
from state_backend.values.zones import zone_of
from tests.support.counting import INPUT_SCHEMA, counting, day


def read(spark: Any, interval: Interval) -> Any:
    """Some rows, the same for a day in every process, and their position."""
    chosen = random.Random(str(interval))
    rows = [(f"u{chosen.randrange(40)}", f"i{chosen.randrange(9)}", chosen.randrange(100)) for _ in range(60)]
    position = {"rows": repr(rows)}
    if not isinstance(spark, testing.PlanningSession):
        return spark.createDataFrame(rows, INPUT_SCHEMA), position
    return LocalRows(rows, parse_ddl_locally(INPUT_SCHEMA), zone_of("UTC"), "the input"), position


def sink(spark: Any, paths: Sequence[str], interval: Interval, checkpoint_id: int) -> None:
    """A file for each interval, with the number of the checkpoint that has its newest output."""
    Path(os.environ["CAIRN_TEST_SINK"], f"{interval.start:%Y-%m-%d}").write_text(str(checkpoint_id))


def pipeline() -> Pipeline:
    made = counting(source=read, sink=sink if "CAIRN_TEST_SINK" in os.environ else None)
    return replace(made, engine=replace(made.engine, cache_dir=None))


def run_days(root: str, days: int, number: int, where: str | None = None) -> None:
    """All days as one run, in its try of this number. ``where``: a Spark, as `connect` takes it."""
    piped = pipeline()
    spark: Any = testing.PlanningSession("UTC") if where is None else connect(where, "a range that is killed")
    run_intervals(
        spark,
        piped,
        [day(n) for n in range(days)],
        root,
        reprocess="all",
        run=RunRef(run_id="range", clear_number=0, try_number=number),
        on_shards=partial(testing._on_shards, piped.processor) if where is None else None,
        on_outcome=lambda outcome, progress: print(progress.done, outcome.computed, flush=True),
    )


if __name__ == "__main__":
    print("ready", flush=True)
    run_days(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
